"""A launcher's variables, read so that all that is wrong with them is told at once."""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.cluster.place import Address
from lockstep.errors import OptionError, Problems


class Variables:
    """A launcher's variables; what is wrong with them is noted, and raised at once.

    Args:
        launcher: its name.
        environ: all variables.
    """

    def __init__(self, launcher: str, environ: Mapping[str, str]) -> None:
        self.launcher = launcher
        self._environ = environ
        self._problems = Problems()
        self.are_sound = True  # until something is noted

    def get(self, *names: str) -> str:
        """The first of these that is set; "" where none is."""
        return next((self._environ[name] for name in names if self._environ.get(name)), "")

    def text(self, *names: str) -> str:
        """The first of these that is set, which one must be."""
        found = self.get(*names)
        if not found:
            self.reject(f"{' or '.join(names)} must be set.", "nothing")
        return found

    def number(self, *names: str, least: int = 0) -> int:
        """A number that must be set; ``least`` where it is not, or is none."""
        text = self.text(*names)
        if text:
            return self._parse_number(text, names, least)
        return least

    def number_or_none(self, *names: str, least: int = 0) -> int | None:
        """A number that need not be set."""
        text = self.get(*names)
        return self._parse_number(text, names, least) if text else None

    def rendezvous(self, candidates: Callable[[], list[Address]]) -> tuple[Address, ...]:
        """LOCKSTEP_RENDEZVOUS, or what the launcher says."""
        text = self.get("LOCKSTEP_RENDEZVOUS")
        return self.addresses("LOCKSTEP_RENDEZVOUS", [text]) if text else tuple(candidates())

    def addresses(self, what: str, texts: list[Any]) -> tuple[Address, ...]:
        """Those that are written as addresses are."""
        found = []
        for text in texts:
            try:
                found.append(Address.parse(str(text)))
            except ValueError as error:
                self.reject(f"{what} must be host:port, with an IPv6 address in brackets.", error)
        return tuple(found)

    def devices(self, num_processes: int) -> int | None:
        """LOCKSTEP_DEVICES, or the number of processes where each is one device."""
        devices = self.number_or_none("LOCKSTEP_DEVICES", least=1)
        if num_processes == 1:
            return devices
        self.check_agreement(
            devices in (None, num_processes),
            "Each process is one device where a host has several.",
            f"LOCKSTEP_DEVICES={devices} with {num_processes} processes",
        )
        return num_processes

    def check(self, is_right: bool, what: str, received: object) -> None:
        """Note a problem, unless it is none."""
        if not is_right:
            self.reject(what, received)

    def check_agreement(self, is_right: bool, what: str, received: object) -> None:
        """Note a contradiction, unless it may come from what was noted before."""
        self.check(is_right or not self.are_sound, what, received)

    def reject(self, what: str, received: object) -> None:
        """Note a problem."""
        self.are_sound = False
        fix = f"{self.launcher} says where this process runs: correct it, or unset its variables."
        self._problems.add(what, received=received, fix=fix)

    def raise_if_any(self) -> None:
        """Raise what was noted."""
        self._problems.raise_if_any(OptionError)

    def _parse_number(self, text: str, names: tuple[str, ...], least: int) -> int:
        if is_number(text) and int(text) >= least:
            return int(text)
        name = next(name for name in names if self._environ.get(name))
        self.reject(f"{name} must be a number of at least {least}.", repr(text))
        return least


def is_number(text: str) -> bool:
    """Whether it is written as launchers write counts."""
    # At most 10 digits: nothing that launchers count has more, and int() refuses thousands.
    return text.isascii() and text.isdigit() and len(text) <= 10
