"""Finds the module where a difference begins, and the likely cause.

Both sides repeat the training up to the first step that differs. In that step, each module's inputs
and outputs are compared in the order in which the plain loop computes them, then the gradients of
the outputs. The first difference names the module: equal inputs with different outputs point to the
module itself, different inputs to the code between it and the modules before.

A pipeline runs some modules instruction by instruction; their submodules are compared instead. The
rows of all shares are concatenated along the dim whose sizes add up. The same numbers in another
order (samples behind time, say) agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.parallel.debug.module_watch import GRADIENT, INPUT, Noted, Spot
from lockstep.proof import comparison
from lockstep.proof.comparison import Comparison, distance, norm_of
from lockstep.train.callbacks.driver import Snapshot

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

# By share: the rank, and the value that its module computed.
_Pieces = dict[int, tuple[int, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Where a difference begins.

    Attributes:
        kind: "data", "forward", "code", "batch statistics", "random numbers", "loss", "backward",
            "sum of gradients", "update", "buffers", or "not repeated".
        module: name of the first module whose output or gradient differs; None if all agree.
        step: from 0.
        ranks: the ranks that differ; empty if all do.
        text: the cause as a sentence.
    """

    kind: str
    module: str | None
    step: int
    ranks: tuple[int, ...] = ()
    text: str


def locate(
    model: nn.Module, first: Comparison, snapshot: Snapshot, noted: Noted, tolerance: float
) -> Cause:
    """Find the cause of a difference.

    Args:
        model: the reference's model.
        first: the first difference.
        snapshot: of the step in which it was found, with the values of Lockstep's modules.
        noted: the values of the reference's modules in that step.
        tolerance: smaller differences between values of modules do not count.
    """
    pieces = _by_spot(snapshot.noted)
    (expected,) = noted.values() if noted else ([],)
    gradients = norm_of(value for spot, value in expected if spot.kind == GRADIENT)
    factor = snapshot.num_samples / snapshot.weight if snapshot.weight else 1.0
    for spot, value in expected:
        if not value.is_floating_point() or spot not in pieces:
            continue
        is_gradient = spot.kind == GRADIENT
        if is_gradient and first.kind == comparison.LOSS:  # a wrong loss has wrong gradients
            break
        found = pieces[spot]
        if is_gradient and len(found) > 1:  # a single share has divided by its own weight
            found = {share: (rank, one * factor) for share, (rank, one) in found.items()}
        relative, ranks = _compare(found, value, gradients if is_gradient else 0.0, tolerance)
        if relative > tolerance:
            return _of_module(model, spot, first.step, relative, ranks)
    return _of_kind(first)


def not_repeated(first: Comparison) -> Cause:
    """The cause if a second run did not differ in that step."""
    return Cause(
        kind="not repeated",
        module=None,
        step=first.step,
        text=f"A second run did not differ in step {first.step}: what is computed differs from run "
        "to run. Look for random numbers that no seed reaches, for what a run leaves behind in "
        "globals, and for processes that race.",
    )


def _by_spot(noted: Sequence[Noted]) -> dict[Spot, _Pieces]:
    found: dict[Spot, _Pieces] = {}
    for rank, shares in enumerate(noted):
        for share, values in shares.items():
            for spot, value in values:
                found.setdefault(spot, {})[share] = rank, value
    return found


def _compare(
    pieces: Mapping[int, tuple[int, torch.Tensor]],
    expected: torch.Tensor,
    scale: float,
    tolerance: float,
) -> tuple[float, tuple[int, ...]]:
    """The largest relative difference, and the ranks that differ; no ranks if all differ."""
    tensors = [value.to(expected.dtype) for _, (_, value) in sorted(pieces.items())]
    ranks = [rank for _, (rank, _) in sorted(pieces.items())]
    if all(one.shape == expected.shape for one in tensors):  # values without a dim for samples
        distances = [distance(one, expected, scale) for one in tensors]
    else:
        dim = _dim_of_rows(tensors, expected)
        if dim is None:
            return 0.0, ()
        whole = torch.cat(tensors, dim)
        in_order = [one.flatten().sort().values for one in (whole, expected)]
        if distance(in_order[0], in_order[1], scale) <= tolerance:
            return 0.0, ()
        rows = expected.split([one.shape[dim] for one in tensors], dim)
        scale = max(scale, norm_of([expected]))
        distances = [distance(one, own, scale) for one, own in zip(tensors, rows, strict=True)]
    different = sorted(
        {rank for rank, one in zip(ranks, distances, strict=True) if one > tolerance}
    )
    return max(distances), tuple(different) if len(different) < len(set(ranks)) else ()


def _dim_of_rows(pieces: Sequence[torch.Tensor], whole: torch.Tensor) -> int | None:
    for dim in range(whole.dim()):
        others = {(*one.shape[:dim], *one.shape[dim + 1 :]) for one in (*pieces, whole)}
        if len(others) == 1 and sum(one.shape[dim] for one in pieces) == whole.shape[dim]:
            return dim
    return None


def _of_module(
    model: nn.Module, spot: Spot, step: int, relative: float, ranks: tuple[int, ...]
) -> Cause:
    module = model.get_submodule(spot.module)
    kind, advice = _kind_of(module, spot)
    who = ""
    if ranks:
        who = f", on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} only"
        advice += " Other ranks agree: see what their process has that this one lacks."
    what = {INPUT: "what {} takes", GRADIENT: "the gradient of what {} returns"}
    value = what.get(spot.kind, "what {} returns").format(_named(spot.module, module))
    return Cause(
        kind=kind,
        module=spot.module,
        step=step,
        ranks=ranks,
        text=f"The first that differs is {value}, in step {step}{who}: relative {relative:.1e}. "
        f"{advice}",
    )


def _named(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{name!r} ({kind})" if name else f"the model ({kind})"


def _kind_of(module: nn.Module, spot: Spot) -> tuple[str, str]:
    if spot.kind == GRADIENT:
        return "backward", (
            "All outputs agree, and all gradients behind it: look at the backward pass of what "
            "uses it, and at the loss."
        )
    if spot.kind == INPUT:
        if not spot.module:
            return "data", "Look at the data, and at what reading it draws and changes."
        return "code", (
            "What the modules before it return agrees: look at the code that calls it, for what "
            "depends on other samples, on shapes, or on random numbers."
        )
    if isinstance(module, _BatchNorm):
        return "batch statistics", "What it takes agrees: its statistics are not the batch's."
    if isinstance(module, _DROPOUTS):
        return "random numbers", "What it takes agrees: it draws other random numbers."
    return "forward", (
        "What it takes agrees: look at its own code, for what depends on other samples, on "
        "settings, or on what it keeps from call to call."
    )


_KINDS = {
    comparison.LOSS: ("loss", "What all modules return agrees: look at the loss, and its weight."),
    comparison.GRADIENT: (
        "sum of gradients",
        "What all modules return agrees, and so do the gradients there: look at how this "
        "parameter's gradient is formed and summed over the shares.",
    ),
    comparison.SLOT: ("update", "All gradients agree: look at the optimizer."),
    comparison.PARAMETER: ("update", "All gradients agree: look at the optimizer, and at hooks."),
    comparison.BUFFER: ("buffers", "All that is computed agrees: look at what sets this buffer."),
}


def _of_kind(first: Comparison) -> Cause:
    kind, advice = _KINDS[first.kind]
    ranks = () if first.rank is None else (first.rank,)
    return Cause(
        kind=kind,
        module=None,
        step=first.step,
        ranks=ranks,
        text=f"The first that differs is {first}. {advice}",
    )
