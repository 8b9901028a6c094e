"""Formats numbers for people: bytes, counts and times with units; lists; tables as text."""

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

_NUM_NAMED = 5  # items in a message before the rest is only counted


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 1)):
        if abs(round(num_bytes, digits)) < 1024:
            return f"{num_bytes:.{digits}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


_SIZES = {unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))} | {
    unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), start=1)
}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_SIZES)})")


def parse_bytes(text: str) -> int | None:
    """``"1.5 KiB"`` -> ``1536``; None for what is no size."""
    found = _SIZE.fullmatch(text.strip())
    return round(float(found[1]) * _SIZES[found[2]]) if found else None


def format_count(count: float) -> str:
    """``1234567`` -> ``"1,234,567"``; rates keep three digits: ``12.345`` -> ``"12.3"``."""
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.3g}"


def format_seconds(seconds: float) -> str:
    """``3725`` -> ``"1:02:05"``, ``75`` -> ``"1:15"``, ``2.34`` -> ``"2.3 s"``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_time(seconds: float) -> str:
    """Short times in milliseconds: ``0.0412`` -> ``"41.2 ms"``; from 10 s on ``format_seconds``."""
    return format_seconds(seconds) if seconds >= 10 else f"{format_count(1000 * seconds)} ms"


def format_value(value: Any) -> str:
    """A loss or metric: ``0.51234`` -> ``"0.5123"``, ``0.00012345`` -> ``"1.23e-04"``."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def listed(names: Iterable[str]) -> str:
    """``["a", "b"]`` -> ``"['a', 'b']"``, as users would write it."""
    return f"[{', '.join(map(repr, names))}]"


def first_few(items: Sequence[object]) -> str:
    """``[1, 2, 3, 4, 5, 6, 7]`` -> ``"1, 2, 3, 4, 5 and 2 more"``."""
    shown = ", ".join(map(str, items[:_NUM_NAMED]))
    return f"{shown} and {len(items) - _NUM_NAMED} more" if len(items) > _NUM_NAMED else shown


def plain_text(*parts: Any) -> str:
    """Objects that rich can print, as text without styles."""
    from rich.console import Console

    text = io.StringIO()
    console = Console(
        file=text, width=100, color_system=None, force_terminal=False, force_jupyter=False
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())
