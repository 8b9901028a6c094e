"""What the processor is good at: where torch's own choice of a kernel was measured to be slow."""

import functools
from pathlib import Path

import torch


@functools.cache
def has_faster_onednn() -> bool:
    """Whether oneDNN multiplies float32 faster than MKL, which torch uses.

    On AMD processors it was measured 8 to 25 % faster in forward and input gradient.
    """
    return _is_amd() and torch.backends.mkldnn.is_available() and _has_operator()


@functools.cache
def has_slow_bfloat16_attention() -> bool:
    """Whether attention goes backward faster in float32 than in bfloat16.

    On an AMD processor (Zen 4) bfloat16 was measured to take 3.5 times as long.
    """
    return _is_amd()


def _is_amd() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "AuthenticAMD" in cpu.read_text()


def _has_operator() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")
