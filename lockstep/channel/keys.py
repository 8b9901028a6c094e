"""The keys of a connection between hosts: one for each direction."""

import hmac
from dataclasses import dataclass, field

_CALLER, _ANSWERER = b"lockstep caller's records", b"lockstep answerer's records"
_NEXT_TASK = b"lockstep next task"


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys with which one end seals and opens records; left out of its repr.

    Attributes:
        sending: of what this end sends.
        receiving: of what it receives.
    """

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)

    @classmethod
    def agreed(cls, material: bytes, *, is_caller: bool) -> "Keys":
        """One end's keys, from 32 bytes that only the two ends know."""
        caller, answerer = following(material, _CALLER), following(material, _ANSWERER)
        if is_caller:
            return cls(sending=caller, receiving=answerer)
        return cls(sending=answerer, receiving=caller)

    def next(self) -> "Keys":
        """The keys of the connection's next task: records of one task do not open in another."""
        return Keys(
            sending=following(self.sending, _NEXT_TASK),
            receiving=following(self.receiving, _NEXT_TASK),
        )


def following(key: bytes, label: bytes) -> bytes:
    """A key that is derived from another one, which it does not reveal."""
    return hmac.digest(key, label, "sha256")
