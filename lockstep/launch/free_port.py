"""A port that is free on a host, asked for on that host: ``python -m lockstep.launch.free_port``.

It prints one for the name that it is given, at the address which the name has there. Another
process may take the port before the job does; the job then says so.
"""

import socket
import sys


def find_free_port(name: str) -> int:
    """A free port at the address that a name has on this host.

    Raises:
        OSError: the name has no address, or not one of this host.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        port: int = probe.getsockname()[1]
    return port


def main() -> int:
    """Print it, or why there is none."""
    try:
        print(find_free_port(sys.argv[1]))  # noqa: T201
    except OSError as error:
        print(f"{sys.argv[1]} is no address of this host: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
