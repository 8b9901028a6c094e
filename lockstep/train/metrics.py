"""torchmetrics on many ranks: each updates its own states, rank 0 joins them in rank order."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from lockstep.data.trees import Tree
from lockstep.errors import DataError, OptionError, problem

if TYPE_CHECKING:
    from torchmetrics import Metric

States = dict[str, Any]


class Metrics:
    """The user's metrics by name.

    Args:
        metrics: name -> torchmetrics Metric.

    Raises:
        OptionError: something that is no Metric, or a name that is taken.
    """

    def __init__(self, metrics: Mapping[str, Any] | None) -> None:
        if metrics is not None and not isinstance(metrics, Mapping):
            raise OptionError(
                problem(
                    "`metrics` must be a dict of metrics by name.",
                    received=type(metrics).__name__,
                    fix='Pass {"accuracy": torchmetrics.Accuracy(...)}, for example.',
                )
            )
        self.by_name: dict[str, Metric] = {}
        for name, metric in (metrics or {}).items():
            if not _is_metric(metric):
                raise OptionError(
                    problem(
                        f"metrics[{name!r}] must be a torchmetrics.Metric.",
                        received=type(metric).__name__,
                        fix="Pass its members by name: metrics=dict(collection.items())."
                        if _is_collection(metric)
                        else 'Pass {"accuracy": torchmetrics.Accuracy(...)}, for example.',
                    )
                )
            if name == "loss" or name.startswith("val_"):
                raise OptionError(
                    problem(
                        "A metric cannot be named 'loss' or 'val_...': these names are taken.",
                        received=repr(name),
                        fix="Give it another name.",
                    )
                )
            self.by_name[name] = metric

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def reset(self) -> None:
        """Forget all samples."""
        for metric in self.by_name.values():
            metric.reset()

    @torch.no_grad()
    def update(self, output: Tree, target: Tree) -> None:
        """Take in a share's outputs and targets.

        Raises:
            DataError: there are no targets.
        """
        if target is None and self:
            raise targetless()
        for metric in self.by_name.values():
            metric.update(output, target)

    def states(self) -> list[list[States]]:
        """The states of every metric and of those inside it, to be sent to rank 0."""
        return [[_states(part) for part in _parts(metric)] for metric in self.by_name.values()]

    def merge(self, ranks: list[list[list[States]]]) -> None:
        """On rank 0: take over the states of all ranks, as torchmetrics reduces them."""
        for number, metric in enumerate(self.by_name.values()):
            for place, part in enumerate(_parts(metric)):
                _merge(part, [states[number][place] for states in ranks])

    def values(self) -> dict[str, Any]:
        """The metrics' values: numbers, or lists of numbers for metrics with several."""
        return {
            name: _plain(metric.compute())
            for name, metric in self.by_name.items()
            if metric._update_count
        }


def targetless() -> DataError:
    """For data that metrics cannot work with."""
    return DataError(
        problem(
            "Metrics compare outputs with targets.",
            received="data without targets",
            fix="Pass (inputs, targets), also where the model computes its own loss.",
        )
    )


def _is_metric(value: object) -> "TypeGuard[Metric]":
    # torchmetrics takes as long to import as torch: only those wait who use it.
    from torchmetrics import Metric

    return isinstance(value, Metric)


def _is_collection(value: object) -> bool:
    from torchmetrics import MetricCollection

    return isinstance(value, MetricCollection)


def _parts(metric: "Metric") -> list["Metric"]:
    """The metric, and those that it wraps or combines: they hold the states then."""
    return [part for part in metric.modules() if _is_metric(part)]


def _states(metric: "Metric") -> States:
    states = {name: getattr(metric, name) for name in metric._reductions}
    return {"_update_count": metric._update_count, **states}


def _merge(metric: "Metric", ranks: list[States]) -> None:
    """Ranks that saw no sample have nothing to say: their states are no more than defaults."""
    counts = [states["_update_count"] for states in ranks]
    filled = [states for states, count in zip(ranks, counts, strict=True) if count] or ranks[:1]
    for name, reduction in metric._reductions.items():
        values = [states[name] for states in filled]
        setattr(metric, name, values[0] if len(values) == 1 else _joined(values, reduction))
    metric._update_count = sum(counts)
    metric._computed = None


def _joined(values: list[Any], reduction: Any) -> Any:
    """Join one state of all ranks as ``Metric.sync`` does: reduce stacked tensors, chain lists."""
    if not isinstance(values[0], torch.Tensor):
        return [entry for value in values for entry in value]
    stacked = torch.stack(values)
    return reduction(stacked) if callable(reduction) else stacked


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value
