"""The keys of a connection between hosts: one for each direction."""

import hmac
from dataclasses import dataclass, field

_CALLER, _ANSWERER = b"lockstep caller's records", b"lockstep answerer's records"
_NEXT_TASK = b"lockstep next task"


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What one end seals and opens records with. They are not shown.

    Attributes:
        sending: of what this end sends.
        receiving: of what it receives.
    """

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)

    @classmethod
    def agreed(cls, material: bytes, *, is_caller: bool) -> "Keys":
        """One end's keys, from 32 bytes that nobody but the two ends knows."""
        caller, answerer = following(material, _CALLER), following(material, _ANSWERER)
        if is_caller:
            return cls(sending=caller, receiving=answerer)
        return cls(sending=answerer, receiving=caller)

    def next(self) -> "Keys":
        """Those of the connection's next task: no record of one is good in another."""
        return Keys(
            sending=following(self.sending, _NEXT_TASK),
            receiving=following(self.receiving, _NEXT_TASK),
        )


def following(key: bytes, label: bytes) -> bytes:
    """A key that is made of another one, from which that one cannot be found."""
    return hmac.digest(key, label, "sha256")
