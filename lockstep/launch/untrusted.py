"""Untrusted data: what another host says of itself, as values of a known type.

It is JSON, so only plain values are made of it. Its texts are shown in errors and tables, and as
names: control characters in them become visible escapes, so that no terminal obeys them.
"""

from typing import Any, TypeVar

import msgspec

from lockstep.errors import HostError, printable

_T = TypeVar("_T")


def decode_untrusted(payload: bytes | str, kind: type[_T], sender: str = "Another host") -> _T:
    """The value of type ``kind`` that is written there as JSON.

    Args:
        payload: the JSON.
        kind: of the value.
        sender: where it is from, for messages.

    Raises:
        HostError: it is no such value.
    """
    try:
        return msgspec.convert(_shown(msgspec.json.decode(payload)), kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HostError(
            f"{sender} must send data of the form that this host expects.",
            received=error,
            fix="Run the same version of Lockstep on every host.",
        ) from error


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): _shown(each) for key, each in value.items()}
    return value
