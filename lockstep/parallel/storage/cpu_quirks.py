"""Processors on which torch's choice of a kernel is slow, or wrong."""

import functools
import platform

import torch
from torch import nn

from lockstep.cluster.devices import processor_line

_VECTOR_SIZE = 8  # float32 numbers, with AVX2


@functools.cache
def has_slow_bfloat16_attention() -> bool:
    """True if attention's backward pass is faster in float32 than in bfloat16.

    On an AMD processor (Zen 4) bfloat16 was measured to take 3.5 times as long.
    """
    return processor_line("vendor_id") == "AuthenticAMD"


@functools.cache
def lacks_lstm(dtype: torch.dtype) -> bool:
    """True if torch cannot run an LSTM under autocast to this type here.

    It uses oneDNN's, which has none in bfloat16 for processors without AVX-512, and none in float16
    for most processors. So this runs one.
    """
    zeros = torch.zeros(1, 1, 1)
    weights = [torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4), torch.zeros(4)]
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            torch.lstm(zeros, (zeros, zeros), weights, True, 1, 0.0, False, False, False)
    except RuntimeError:
        return True
    return False


def breaks_channels_last(model: nn.Module) -> bool:
    """True if training a model on images with their channels last would corrupt memory here.

    Without AVX-512 and with channels last, the backward pass of oneDNN (in torch 2.13) writes out
    of bounds for kernels of one pixel with a stride and fewer channels than a vector has numbers:
    ``Conv2d(4, 6, 1, stride=2)`` ends the process within a few batches.
    See github.com/uxlfoundation/oneDNN/issues/6035.
    """
    return _lacks_avx512() and any(
        isinstance(one, nn.Conv2d)
        and max(one.kernel_size) == 1 < max(one.stride)
        and one.in_channels // one.groups < _VECTOR_SIZE
        for one in model.modules()
    )


@functools.cache
def _lacks_avx512() -> bool:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return is_x86 and "AVX512" not in torch.backends.cpu.get_cpu_capability()
