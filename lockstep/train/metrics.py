"""torchmetrics on many ranks: each updates its own states, rank 0 joins them in rank order.

An update of a metric takes some 150 microseconds however few the samples, which is much beside the
step of a small model. So metrics that do nothing but count samples by class are updated with the
outputs of several steps at once, where these are small: the counts are the same.

A metric follows the outputs to their device; states travel in host memory.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.errors import DataError, OptionError

if TYPE_CHECKING:
    from torchmetrics import Metric

States = dict[str, Any]

# A share's outputs wait for others if they have at most so many elements; so many wait at most.
_FEW_ELEMENTS = 1 << 14
_MOST_WAITING = 32


class Metrics:
    """The user's metrics by name.

    Args:
        metrics: name -> torchmetrics Metric.
        dims: where the samples are in what they take.

    Raises:
        OptionError: something that is no Metric, or a name that is taken.
    """

    _dims: BatchDims = SAMPLES_FIRST

    def __init__(self, metrics: Mapping[str, Any] | None, dims: BatchDims = SAMPLES_FIRST) -> None:
        self._dims = dims
        if metrics is not None and not isinstance(metrics, Mapping):
            raise OptionError(
                "`metrics` must be a dict of metrics by name.",
                received=type(metrics).__name__,
                fix='Pass {"accuracy": torchmetrics.Accuracy(...)}, for example.',
            )
        self.by_name: dict[str, Metric] = {}
        for name, metric in (metrics or {}).items():
            if not _is_metric(metric):
                raise OptionError(
                    f"metrics[{name!r}] must be a torchmetrics.Metric.",
                    received=type(metric).__name__,
                    fix="Pass its members by name: metrics=dict(collection.items())."
                    if _is_collection(metric)
                    else 'Pass {"accuracy": torchmetrics.Accuracy(...)}, for example.',
                )
            if name == "loss" or name.startswith("val_"):
                raise OptionError(
                    "A metric cannot be named 'loss' or 'val_...': these names are taken.",
                    received=repr(name),
                    fix="Give it another name.",
                )
            self.by_name[name] = metric
        self._counters: list[Metric] = []
        self._others: list[Metric] = []
        for metric in self.by_name.values():
            (self._counters if _counts_samples(metric) else self._others).append(metric)
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._form: object = None  # of those that wait

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def reset(self) -> None:
        """Forget all samples."""
        self._waiting.clear()
        for metric in self.by_name.values():
            metric.reset()

    def update(self, output: Tree, target: Tree) -> None:
        """Take in a share's outputs and targets.

        Raises:
            DataError: there are no targets.
        """
        if target is None and self:
            raise targetless()
        if self._dims:  # batches of these may not be put together
            given = self._dims.given_outputs(output), self._dims.given_targets(target)
            _update(list(self.by_name.values()), *given)
            return
        if self._others:
            _update(self._others, output, target)
        if self._counters:
            self._take_in(output, target)

    def _take_in(self, output: Tree, target: Tree) -> None:
        form = _small_form(output, target)
        if form is None or form != self._form:
            self._count_waiting()
            self._form = form
        if form is None:
            _update(self._counters, output, target)
            return
        self._waiting.append((output.clone(), target.clone()))  # others may use their memory
        if len(self._waiting) == _MOST_WAITING:
            self._count_waiting()

    def _count_waiting(self) -> None:
        """Take in the outputs that wait, all at once."""
        if self._waiting:
            outputs, targets = zip(*self._waiting, strict=True)
            num_others = len(self._waiting) - 1
            self._waiting.clear()
            _update(self._counters, torch.cat(outputs), torch.cat(targets))
            for metric in self._counters:
                metric._update_count += num_others

    def states(self) -> list[list[States]]:
        """The states of every metric and of those inside it, to be sent to rank 0."""
        self._count_waiting()
        return [[_states(part) for part in _parts(metric)] for metric in self.by_name.values()]

    def light_states(self) -> dict[str, list[States]]:
        """States of those metrics whose states do not grow with the samples."""
        self._count_waiting()
        return {
            name: [_states(part) for part in _parts(metric)]
            for name, metric in self.by_name.items()
            if not any(map(_grows, _parts(metric)))
        }

    def values_so_far(self, ranks: list[dict[str, list[States]]]) -> dict[str, Any]:
        """On rank 0: values of the ``light_states`` of all ranks. The metrics stay as they are.

        Those that cannot be computed of so few samples are left out.
        """
        found: dict[str, Any] = {}
        for name in ranks[0]:
            metric = copy.deepcopy(self.by_name[name])
            for place, part in enumerate(_parts(metric)):
                _merge(part, [states[name][place] for states in ranks])
            with suppress(Exception):  # R2Score, for example, needs two samples
                found |= {name: _plain(metric.compute())} if metric._update_count else {}
        return found

    def merge(self, ranks: list[list[list[States]]]) -> None:
        """On rank 0: take over the states of all ranks, as torchmetrics reduces them."""
        for number, metric in enumerate(self.by_name.values()):
            for place, part in enumerate(_parts(metric)):
                _merge(part, [states[number][place] for states in ranks])

    def values(self) -> dict[str, Any]:
        """The metrics' values: numbers, or lists of numbers for metrics with several."""
        self._count_waiting()
        return {
            name: _plain(metric.compute())
            for name, metric in self.by_name.items()
            if metric._update_count
        }


def targetless() -> DataError:
    """For data that metrics cannot work with."""
    return DataError(
        "Metrics compare outputs with targets.",
        received="data without targets",
        fix="Pass (inputs, targets), also where the model computes its own loss.",
    )


def _is_metric(value: object) -> "TypeGuard[Metric]":
    # torchmetrics takes as long to import as torch: only those wait who use it.
    from torchmetrics import Metric

    return isinstance(value, Metric)


def _is_collection(value: object) -> bool:
    from torchmetrics import MetricCollection

    return isinstance(value, MetricCollection)


def _counts_samples(metric: "Metric") -> bool:
    """Whether it is one of torchmetrics' own that count what samples are taken for, class by class.

    By exact type: a subclass may do anything. Not those for two classes or several labels, which
    look at all of an update to tell scores from probabilities.
    """
    from torchmetrics import classification

    names = ("StatScores", "Accuracy", "Precision", "Recall", "F1Score", "ConfusionMatrix")
    kinds = [getattr(classification, f"Multiclass{name}") for name in names]
    return type(metric) in kinds and getattr(metric, "multidim_average", "global") == "global"


@torch.no_grad()
def _update(metrics: "list[Metric]", output: Tree, target: Tree) -> None:
    first = next(tensors_of((output, target)), None)
    for metric in metrics:
        if first is not None and metric.device != first.device:
            metric.to(first.device)
        metric.update(output, target)


def _small_form(output: Tree, target: Tree) -> object:
    """What shares must have in common to be counted as one; None for one to be counted alone.

    Those may wait that are small and plain: a row of scores and a class for every sample. What is
    wrong with others, the metric says.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    rows, classes = output.shape, target.shape
    if len(rows) != 2 or len(classes) != 1 or rows[0] != classes[0]:
        return None
    if rows[0] * rows[1] > _FEW_ELEMENTS or target.is_floating_point():
        return None
    return rows[1], output.dtype, target.dtype, output.device, target.device


def _parts(metric: "Metric") -> list["Metric"]:
    """The metric, and those that it wraps or combines: they hold the states then."""
    return [part for part in metric.modules() if _is_metric(part)]


def _grows(metric: "Metric") -> bool:
    """Whether its states are lists, which keep what it has seen."""
    return any(isinstance(state, list) for state in metric._defaults.values())


def _states(metric: "Metric") -> States:
    states = {
        name: map_tensors(torch.Tensor.cpu, getattr(metric, name)) for name in metric._reductions
    }
    return {"_update_count": metric._update_count, **states}


def _merge(metric: "Metric", ranks: list[States]) -> None:
    """Ranks that saw no sample have nothing to say: their states are no more than defaults."""
    counts = [states["_update_count"] for states in ranks]
    filled = [states for states, count in zip(ranks, counts, strict=True) if count] or ranks[:1]
    for name, reduction in metric._reductions.items():
        values = [states[name] for states in filled]
        joined = values[0] if len(values) == 1 else _joined(values, reduction)
        setattr(metric, name, map_tensors(methodcaller("to", metric.device), joined))
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
