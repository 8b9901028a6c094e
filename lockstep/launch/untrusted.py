"""Untrusted data: another host's information about itself, as values of a known type.

It is JSON, so it decodes only to plain values. Its texts appear in errors, tables and names: their
control characters become visible escapes, so that no terminal obeys them.
"""

from typing import Any, TypeVar

import msgspec

from lockstep.errors import HostError, printable

_T = TypeVar("_T")


def decode_untrusted(payload: bytes | str, kind: type[_T], sender: str = "Another host") -> _T:
    """Decode JSON to a value of type ``kind``.

    Args:
        payload: the JSON.
        kind: the expected type.
        sender: the host that sent it, for messages.

    Raises:
        HostError: it is not JSON, or has another type.
    """
    try:
        return msgspec.convert(_made_printable(msgspec.json.decode(payload)), kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HostError(
            f"{sender} must send data in the format that this host expects.",
            received=error,
            fix="Run the same version of Lockstep on every host.",
        ) from error


def _made_printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_made_printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): _made_printable(each) for key, each in value.items()}
    return value
