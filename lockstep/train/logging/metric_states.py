"""The states of torchmetrics metrics: updates, sums over shares, reading and setting."""

from collections.abc import Mapping
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.plan.program.sum_tree import tree_sum

if TYPE_CHECKING:
    from torchmetrics import Metric

# Values of attributes, by name.
States = dict[str, Any]


@torch.no_grad()
def update_each(metrics: "list[Metric]", output: Tree, target: Tree) -> None:
    """Update metrics, which follow the outputs to their device."""
    first = next(tensors_of((output, target)), None)
    for metric in metrics:
        if first is not None and metric.device != first.device:
            metric.to(first.device)
        metric.update(output, target)


def sums_of(metric: "Metric", output: Tree, target: Tree) -> States:
    """The amounts that a share adds to the states of a metric that is a sum.

    Sums are taken in the outputs' precision, if that is higher than the states'.
    """
    kept, count = {name: getattr(metric, name) for name in metric._defaults}, metric._update_count
    dtype = next(tensors_of((output, target))).dtype
    for name, state in kept.items():
        is_float = state.is_floating_point() and dtype.is_floating_point
        wide = torch.promote_types(state.dtype, dtype) if is_float else state.dtype
        setattr(metric, name, torch.zeros_like(state, dtype=wide))
    update_each([metric], output, target)
    sums = {name: getattr(metric, name) for name in kept}
    set_states(metric, {**kept, "_update_count": count})
    return sums


def add_sums(metric: "Metric", shares: Mapping[int, States]) -> None:
    """Add the sum over a batch's shares, as one update.

    A single number is added without dims, as in torchmetrics: rounding depends on that.
    """
    added: States = {"_update_count": metric._update_count + 1}
    for name in metric._defaults:
        total = tree_sum({share: sums[name] for share, sums in shares.items()})
        state = getattr(metric, name)
        one = total.squeeze() if total.numel() == 1 else total
        added[name] = state.clone().add_(one.to(state.device))
    set_states(metric, added)


def states_of(metric: "Metric") -> States:
    """Its own states, and their number of updates."""
    states = {name: getattr(metric, name).cpu() for name in metric._defaults}
    return {"_update_count": metric._update_count, **states}


def all_states_of(part: "Metric") -> States:
    """All that an update may change: states, and other attributes (``Running`` counts)."""
    is_config = ("_computed", "_cache", "training")
    return {
        name: map_tensors(torch.Tensor.cpu, value)
        for name, value in vars(part).items()
        if name not in is_config and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, torch.Tensor) for one in value)
    return isinstance(value, int | float | torch.Tensor)


def set_states(metric: "Metric", values: States) -> None:
    """Set values of attributes, and clear its cached result."""
    for name, value in values.items():
        setattr(metric, name, map_tensors(methodcaller("to", metric.device), value))
    metric._computed = None


def plain_value(value: Any) -> Any:
    """The computed value of a metric, as it is logged."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: plain_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    return value
