"""Finds a free port of this host: ``python -m lockstep.launch.free_port NAME`` prints one.

The port is free at the address that NAME has on this host. Another process may take it before the
job does; the job then raises an error.
"""

import socket
import sys


def find_free_port(name: str) -> int:
    """A free port at the address that a name has on this host.

    Raises:
        OSError: the name has no address, or an address of another host.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        port: int = probe.getsockname()[1]
    return port


def main() -> int:
    """Print a free port, or the reason why there is none."""
    try:
        print(find_free_port(sys.argv[1]))  # noqa: T201
    except OSError as error:
        print(  # noqa: T201
            f"{sys.argv[1]} is not an address of this host: {error}", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
