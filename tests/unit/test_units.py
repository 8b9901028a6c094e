"""Numbers for people."""

import pytest

from lockstep.formatting import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1.5 * 1024**3, "1.5 GiB"),
        (1024**4, "1.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (7, "7"),
        (12.0, "12"),
        (12.345, "12.3"),
        (0.01234, "0.0123"),
        (99.99, "100"),
        (123.4, "123"),
        (1234567, "1,234,567"),
    ],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (2.34, "2.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1:00"),
        (75, "1:15"),
        (119.7, "2:00"),
        (3599.6, "1:00:00"),
        (3725, "1:02:05"),
        (100 * 3600, "100:00:00"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
