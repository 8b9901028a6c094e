"""A launcher's variables, read and checked; one error lists everything that is wrong with them."""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.cluster.place import Address
from lockstep.errors import OptionError, Problems


class Variables:
    """A launcher's variables. Problems are collected, and raised together.

    Args:
        launcher: its name.
        environ: all variables.

    Attributes:
        are_sound: True until a problem is noted.
    """

    def __init__(self, launcher: str, environ: Mapping[str, str]) -> None:
        self.launcher = launcher
        self._environ = environ
        self._problems = Problems()
        self.are_sound = True

    def get(self, *names: str) -> str:
        """The first of these that is set; "" if none is."""
        return next((self._environ[name] for name in names if self._environ.get(name)), "")

    def text(self, *names: str) -> str:
        """The first of these that is set; a problem if none is."""
        text = self.get(*names)
        if not text:
            self.reject(f"{' or '.join(names)} must be set.", "nothing")
        return text

    def number(self, *names: str, least: int = 0) -> int:
        """A number that must be set; a problem and ``least`` otherwise."""
        text = self.text(*names)
        if text:
            return self._parse_number(text, names, least)
        return least

    def number_or_none(self, *names: str, least: int = 0) -> int | None:
        """A number that may be unset."""
        text = self.get(*names)
        return self._parse_number(text, names, least) if text else None

    def rendezvous(self, candidates: Callable[[], list[Address]]) -> tuple[Address, ...]:
        """LOCKSTEP_RENDEZVOUS, or else the launcher's addresses."""
        text = self.get("LOCKSTEP_RENDEZVOUS")
        return self.addresses("LOCKSTEP_RENDEZVOUS", [text]) if text else tuple(candidates())

    def addresses(self, what: str, texts: list[Any]) -> tuple[Address, ...]:
        """The parsed addresses; a problem for each text that is not an address."""
        addresses = []
        for text in texts:
            try:
                addresses.append(Address.parse(str(text)))
            except ValueError as error:
                self.reject(f"{what} must be host:port, with an IPv6 address in brackets.", error)
        return tuple(addresses)

    def devices(self, num_processes: int, *, is_one_each: bool = False) -> int | None:
        """LOCKSTEP_DEVICES, or the number of processes if each has one device."""
        devices = self.number_or_none("LOCKSTEP_DEVICES", least=1)
        if num_processes == 1 and not is_one_each:
            return devices
        self.check_agreement(
            devices in (None, num_processes),
            "If a host has several processes, or parameter servers, each process has one device.",
            f"LOCKSTEP_DEVICES={devices} with {num_processes} processes",
        )
        return num_processes

    def check(self, is_right: bool, what: str, received: object) -> None:
        """Note a problem if the condition does not hold."""
        if not is_right:
            self.reject(what, received)

    def check_agreement(self, is_right: bool, what: str, received: object) -> None:
        """Note a contradiction, unless an earlier problem may have caused it."""
        self.check(is_right or not self.are_sound, what, received)

    def reject(self, what: str, received: object) -> None:
        """Note a problem."""
        self.are_sound = False
        fix = f"Correct the variables of {self.launcher}, or unset them."
        self._problems.add(what, received=received, fix=fix)

    def raise_if_any(self) -> None:
        """Raise all problems, if any were noted."""
        self._problems.raise_if_any(OptionError)

    def _parse_number(self, text: str, names: tuple[str, ...], least: int) -> int:
        if is_number(text) and int(text) >= least:
            return int(text)
        name = next(name for name in names if self._environ.get(name))
        self.reject(f"{name} must be a number of at least {least}.", repr(text))
        return least


def is_number(text: str) -> bool:
    """True if the text is a count of at most 10 digits: ``int`` fails on thousands of digits."""
    return text.isascii() and text.isdigit() and len(text) <= 10
