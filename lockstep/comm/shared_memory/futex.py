"""Sleeping on a 32-bit word in shared memory until another process changes it.

Linux futexes (man 2 futex) through ``syscall``: no library wraps them. Elsewhere a short sleep
takes their place, which costs latency and nothing else: callers look at the word again anyway.
"""

import ctypes
import platform
import sys
import time

_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYONE = 2**31 - 1

_NUMBER = _SYSCALL_NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
_syscall = ctypes.CDLL(None).syscall if _NUMBER is not None else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait_while_equal(word: ctypes.c_uint32, value: int, timeout_seconds: float) -> None:
    """Sleep while ``word`` is ``value``, at most ``timeout_seconds``; may wake early."""
    if _syscall is None:
        time.sleep(min(timeout_seconds, 50e-6))
        return
    timeout = _Timespec(int(timeout_seconds), int(timeout_seconds % 1 * 1e9))
    _syscall(
        _NUMBER,
        ctypes.byref(word),
        _FUTEX_WAIT,
        ctypes.c_uint32(value),
        ctypes.byref(timeout),
        0,
        0,
    )


def wake_all(word: ctypes.c_uint32) -> None:
    """Wake every process that sleeps on ``word``."""
    if _syscall is not None:
        _syscall(_NUMBER, ctypes.byref(word), _FUTEX_WAKE, _EVERYONE, 0, 0, 0)
