"""Untrusted data: what another host says of itself, as values of a known type.

It is JSON, so only plain values are made of it. Its texts are shown in errors and tables, and as
names: control characters in them become visible escapes, so that no terminal obeys them.
"""

from typing import Any, TypeVar

import msgspec

from lockstep.errors import printable

_T = TypeVar("_T")


def decode_untrusted(payload: bytes | str, kind: type[_T]) -> _T:
    """The value of type ``kind`` that is written there as JSON.

    Raises:
        msgspec.DecodeError: it is none.
    """
    try:
        return msgspec.convert(_shown(msgspec.json.decode(payload)), kind)
    except RecursionError as error:
        raise msgspec.DecodeError("lists in lists without end") from error


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): _shown(each) for key, each in value.items()}
    return value
