"""Products of float32 matrices on CPU cores, by the library that multiplies faster here.

torch asks MKL for them, which uses less of AMD's processors than oneDNN does. A fixed rule and no
timing, so that two runs on one machine compute the same bits.
"""

import functools

import torch

from lockstep.cluster.devices import processor_line

_BLOCK_BYTES = 2**23  # of a product that is copied to its place: in the cache until then


@functools.cache
def has_faster_onednn() -> bool:
    """Whether oneDNN multiplies float32 faster than MKL.

    On AMD processors it was measured to take 0.92 (Zen 4) to 0.45 (Zen 5) of the time with AVX-512,
    and 0.9 without.
    """
    is_amd = processor_line("vendor_id") == "AuthenticAMD"
    has_onednn = torch.backends.mkldnn.is_available()
    return is_amd and has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``input @ weight.T + bias`` of float32 tensors, by oneDNN; outside autograd."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return result


def multiply(
    out: torch.Tensor, output_gradients: torch.Tensor, inputs: torch.Tensor, *, adds: bool
) -> None:
    """``out = output_gradients.T @ inputs``, or ``+=``, multiplied in the inputs' precision."""
    factor = output_gradients.t()
    if inputs.dtype != out.dtype:
        _place(out, factor @ inputs, adds=adds)
    elif out.dtype == torch.float32 and out.device.type == "cpu" and has_faster_onednn():
        _multiply_in_blocks(out, factor, inputs.t(), adds=adds)
    elif adds:
        torch.addmm(out, factor, inputs, out=out)
    else:
        torch.mm(factor, inputs, out=out)


def _multiply_in_blocks(
    out: torch.Tensor, factor: torch.Tensor, turned: torch.Tensor, *, adds: bool
) -> None:
    if out.nbytes <= _BLOCK_BYTES:
        _place(out, product(factor, turned), adds=adds)
        return
    num_rows = max(1, _BLOCK_BYTES * len(out) // out.nbytes)
    for block, rows in zip(out.split(num_rows), factor.split(num_rows), strict=True):
        _place(block, product(rows, turned), adds=adds)


def _place(out: torch.Tensor, result: torch.Tensor, *, adds: bool) -> None:
    out.add_(result) if adds else out.copy_(result)
