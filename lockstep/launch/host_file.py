"""The hosts of ``lockstep run --ssh``, from a file with one line for each.

::

    # host 0, where the others meet it and progress is shown
    node1
    ada@node2 devices=4     # logs in as another user, and uses 4 devices
"""

import re
from pathlib import Path

import msgspec

from lockstep.errors import OptionError, Problems

# A name or address that no command could take for an option.
_LOGIN = re.compile(r"(?:(?P<user>[A-Za-z0-9_][\w.-]*)@)?(?P<name>[A-Za-z0-9_:][\w.:%-]*)")
_DEVICES = re.compile(r"devices=0*([1-9][0-9]{0,5})")


class ListedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file.

    Attributes:
        name: by which ssh and the other hosts reach it.
        user: who logs in; None leaves that to ssh.
        devices: how many it is to use; None where the line does not say.
    """

    name: str
    user: str | None = None
    devices: int | None = None

    @property
    def login(self) -> str:
        """``user@name``, or the name alone."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def read_host_file(path: Path) -> tuple[ListedHost, ...]:
    """The hosts, in the order of the file.

    Raises:
        OptionError: no such file, no host in it, or lines that cannot be read.
    """
    text = _read(path)
    problems = Problems()
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            host = _parse(words)
            if host is None:
                problems.add(
                    "A line of the host file must be [user@]host [devices=N].",
                    received=f"{line.strip()!r} in line {number}",
                    fix="A comment begins with #.",
                )
            else:
                hosts.append(host)
    if not hosts:
        problems.add(
            "The host file must name a host.", received=str(path), fix="Write one on each line."
        )
    problems.raise_if_any(OptionError)
    return tuple(hosts)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            "The host file must be a text file.", received=error, fix="Check its path."
        ) from error


def _parse(words: list[str]) -> ListedHost | None:
    login, devices = _LOGIN.fullmatch(words[0]), None
    if len(words) == 2:
        devices = _DEVICES.fullmatch(words[1])
    if login is None or len(words) > 2 or (len(words) == 2 and devices is None):
        return None
    return ListedHost(
        name=login["name"],
        user=login["user"],
        devices=None if devices is None else int(devices[1]),
    )
