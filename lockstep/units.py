"""Numbers for people: bytes, counts and times with their units."""


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_count(count: float) -> str:
    """``1234567`` -> ``"1,234,567"``; rates keep three digits: ``12.345`` -> ``"12.3"``."""
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.3g}"


def format_seconds(seconds: float) -> str:
    """``3725`` -> ``"1:02:05"``, ``75`` -> ``"1:15"``, ``2.34`` -> ``"2.3 s"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
