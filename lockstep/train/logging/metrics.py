"""torchmetrics on many ranks: each update has a whole batch, as in a loop on one device.

Rank 0 gathers the shares of a batch, and updates the user's own metrics: with outputs and targets
of all samples, or, for a metric that is known to be a sum over samples
(``train.logging.metric_kinds``), with the sum of the shares' amounts. Sums are taken in the same
tree as all sums (``plan.program.sum_tree``), so values have the same bits on any number of ranks.
One message carries several batches, if these are small.

An update of a metric takes about 150 microseconds even for few samples, which is long compared with
a small model's step. So metrics that only count samples by class are updated on every rank, with
the outputs of several steps at once if these are small: the counts are the same.

A metric is moved to the device of the outputs; between ranks they are sent from host memory.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.order import holds_streams, seed_streams, stream_seed
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.errors import DataError, OptionError
from lockstep.parallel.batch_run import ShareOutput
from lockstep.parallel.exchange.control import Control
from lockstep.train.logging.metric_kinds import (
    counts_samples,
    is_collection,
    is_metric,
    keeps_samples,
    parts_of,
    sums_samples,
)
from lockstep.train.logging.metric_states import (
    States,
    add_sums,
    all_states_of,
    plain_value,
    set_states,
    states_of,
    sums_of,
    update_each,
)
from lockstep.train.logging.share_outputs import joined_trees

if TYPE_CHECKING:
    from torchmetrics import Metric

# A share's outputs are collected if they have at most so many elements; so many at most.
_FEW_ELEMENTS = 1 << 14
_MOST_WAITING = 32

# A message to rank 0 carries as many batches as together have at most so many bytes.
_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class MetricUpdate:
    """A share's values, which a rank keeps until rank 0 gathers them.

    Attributes:
        batch: the number of the batch.
        share: the number of the share.
        num_samples: of the share.
        sums: the amounts that the share adds to the states of each metric that is a sum.
        tree: outputs and targets for other metrics; None if there are no others.
    """

    batch: int
    share: int
    num_samples: int
    sums: list[States]
    tree: Tree


class Metrics:
    """The user's metrics by name.

    Args:
        metrics: name -> torchmetrics Metric.
        dims: the dims of samples in outputs and targets.
        seed: for metrics that draw random numbers.

    Raises:
        OptionError: a value is not a Metric, or a name is reserved.
    """

    _dims: BatchDims = SAMPLES_FIRST

    def __init__(
        self, metrics: Mapping[str, Any] | None, dims: BatchDims = SAMPLES_FIRST, seed: int = 0
    ) -> None:
        self._dims = dims
        self._seed = seed
        self.by_name = _checked(metrics)
        self._counters: list[Metric] = []
        self._sums: list[Metric] = []
        self._others: list[Metric] = []
        for metric in self.by_name.values():
            kind = self._counters if counts_samples(metric) else self._others
            (self._sums if sums_samples(metric) else kind).append(metric)
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # collected outputs, targets
        self._form: object = None  # of those
        self._seen: list[MetricUpdate] = []
        self._num_batches = 0
        self._next_message = 1  # after so many batches
        self._num_updates = 0  # of metrics that are not counters, on rank 0
        self._for_validation = copy.deepcopy(self) if self._keeps_more else None

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def reset(self) -> None:
        """Forget all samples."""
        self._waiting.clear()
        self._seen.clear()
        self._num_batches = self._num_updates = 0
        self._next_message = 1
        for metric in self.by_name.values():
            metric.reset()

    @property
    def for_validation(self) -> "Metrics":
        """The metrics for validation within a training."""
        return self._for_validation or self

    # --- shares ----------------------------------------------------------------------------------

    def update(self, part: ShareOutput) -> None:
        """Update with the model's outputs of a share.

        Raises:
            DataError: there are no targets.
        """
        if part.target is None and self:
            raise targetless()
        output = self._dims.given_outputs(part.output)
        target = self._dims.given_targets(part.target)
        if self._counters and self._dims:  # batches with other dims may not be concatenated
            update_each(self._counters, output, target)
        elif self._counters:
            self._collect(output, target)
        sums = [sums_of(metric, output, target) for metric in self._sums]
        if sums or self._others:
            self._keep(part, sums, (part.output, part.target) if self._others else None)

    def _keep(self, part: ShareOutput, sums: list[States], tree: Tree) -> None:
        """Keep a share for rank 0, with copies: the memory of outputs and targets is reused."""
        batch = self._num_batches if part.step is None else part.step
        kept = map_tensors(torch.Tensor.clone, tree)
        self._seen.append(MetricUpdate(batch, part.share, part.num_samples, sums, kept))

    def _collect(self, output: Tree, target: Tree) -> None:
        form = _small_form(output, target)
        if form is None or form != self._form:
            self._count_waiting()
            self._form = form
        if form is None:
            update_each(self._counters, output, target)
            return
        self._waiting.append((output.clone(), target.clone()))  # their memory is reused
        if len(self._waiting) == _MOST_WAITING:
            self._count_waiting()

    def _count_waiting(self) -> None:
        """Update with the collected outputs, all at once."""
        if self._waiting:
            outputs, targets = zip(*self._waiting, strict=True)
            num_others = len(self._waiting) - 1
            self._waiting.clear()
            update_each(self._counters, torch.cat(outputs), torch.cat(targets))
            for metric in self._counters:
                metric._update_count += num_others

    # --- batches ---------------------------------------------------------------------------------

    @property
    def _needs_batches(self) -> bool:
        """True if rank 0 gathers the shares of a batch."""
        return bool(self._sums or self._others)

    def settle(self, control: Control) -> None:
        """Called by every rank after a batch: gather several batches at a time."""
        self._num_batches += 1
        if self._needs_batches and self._num_batches >= self._next_message:
            seen = self._gather(control)
            wait = 1 if control.num_ranks == 1 else control.broadcast(_batches_per_message(seen))
            self._next_message = self._num_batches + wait

    def _gather(self, control: Control) -> list[MetricUpdate]:
        """Gather the kept shares, and update rank 0's metrics; returns the shares, on rank 0."""
        seen, self._seen = self._seen, []
        if control.num_ranks > 1:
            gathered = control.gather(map_tensors(torch.Tensor.cpu, seen))
            seen = [one for own in gathered for one in own]
        seen.sort(key=attrgetter("batch", "share"))
        for batch, shares in groupby(seen, attrgetter("batch")):
            self._update_batch(batch, list(shares))
        return seen

    @holds_streams
    def _update_batch(self, batch: int, shares: Sequence[MetricUpdate]) -> None:
        """Update with a whole batch."""
        self._num_updates += 1
        for number, metric in enumerate(self._sums):
            add_sums(metric, {one.share: one.sums[number] for one in shares})
        if self._others:
            output, target = joined_trees(
                [one.tree for one in shares], [one.num_samples for one in shares]
            )
            seed_streams(stream_seed(self._seed, "metrics", batch))
            given = self._dims.given_outputs(output), self._dims.given_targets(target)
            update_each(self._others, *given)

    def join(self, control: Control) -> None:
        """Complete rank 0's metrics with the samples of all ranks; every rank calls it."""
        if self._needs_batches:
            self._gather(control)
        if self._counters:
            ranks = control.gather(self._counts())
            if ranks:
                self._set_counts(ranks)

    def values_so_far(self) -> dict[str, Any]:
        """The values so far; metrics do not change.

        It leaves out metrics that keep all samples, and those that need more samples.
        """
        empty, found = self._ids_of_empty(), {}
        for name, metric in self.by_name.items():
            if id(metric) not in empty and not keeps_samples(metric):
                with suppress(Exception):  # R2Score, for example, needs two samples
                    found[name] = plain_value(copy.deepcopy(metric).compute())
        return found

    @contextmanager
    def joined(self, control: Control) -> Iterator[None]:
        """Within the block rank 0 has the values of all ranks; then each has its own again."""
        own = self._counts()
        self.join(control)
        yield
        self._set_counts([own])

    def values(self) -> dict[str, Any]:
        """The metrics' values: numbers, lists or dicts of numbers; NaN without samples."""
        self._count_waiting()
        empty = self._ids_of_empty()
        return {
            name: math.nan if id(metric) in empty else plain_value(metric.compute())
            for name, metric in self.by_name.items()
        }

    def _ids_of_empty(self) -> set[int]:
        """The ids of metrics without samples. Metrics cannot be compared: == makes another."""
        empty = [one for one in self._counters if not one._update_count]
        empty += [] if self._num_updates else [*self._sums, *self._others]
        return {id(metric) for metric in empty}

    @property
    def _keeps_more(self) -> bool:
        """True if a metric may keep state beyond a reset, such as extremes of its values."""
        if not self._others:
            return False
        from torchmetrics.wrappers.abstract import WrapperMetric

        parts = [part for metric in self._others for part in parts_of(metric)]
        return any(isinstance(part, WrapperMetric) for part in parts)

    # --- states ----------------------------------------------------------------------------------

    def _counts(self) -> list[States]:
        self._count_waiting()
        return [states_of(metric) for metric in self._counters]

    def _set_counts(self, ranks: Sequence[list[States]]) -> None:
        """Sum the ranks' counts: these are integers, so their order does not matter."""
        for metric, *states in zip(self._counters, *ranks, strict=True):
            set_states(metric, {name: sum(one[name] for one in states) for name in states[0]})

    def states(self, control: Control) -> Tree:
        """On rank 0, the states so far, to resume from; every rank calls it."""
        if self._needs_batches:
            self._gather(control)
        counts = control.gather(self._counts())
        metrics = [*self._sums, *self._others]
        others = [[all_states_of(part) for part in parts_of(metric)] for metric in metrics]
        return {"counts": counts, "others": others, "updates": self._num_updates}

    def go_on_from(self, states: Tree, control: Control) -> None:
        """Restore ``states``; every rank calls it."""
        if control.rank != 0:
            return
        self._set_counts(states["counts"])
        self._num_updates = states["updates"]
        metrics = [*self._sums, *self._others]
        for metric, parts in zip(metrics, states["others"], strict=True):
            for part, kept in zip(parts_of(metric), parts, strict=True):
                set_states(part, kept)


def targetless() -> DataError:
    """The error for data without targets."""
    return DataError(
        "Metrics need targets to compare outputs with.",
        received="data without targets",
        fix="Pass (inputs, targets), even if the model computes its own loss.",
    )


def _checked(metrics: Mapping[str, Any] | None) -> "dict[str, Metric]":
    if metrics is not None and not isinstance(metrics, Mapping):
        raise OptionError(
            "`metrics` must be a dict of metrics by name, or a list of names.",
            received=type(metrics).__name__,
            fix='Pass ["accuracy"], or {"accuracy": torchmetrics.Accuracy(...)}.',
        )
    for name, metric in (metrics or {}).items():
        if not is_metric(metric):
            raise OptionError(
                f"metrics[{name!r}] must be a torchmetrics.Metric.",
                received=type(metric).__name__,
                fix="Pass its members by name: metrics=dict(collection.items())."
                if is_collection(metric)
                else 'Pass {"accuracy": torchmetrics.Accuracy(...)}, for example.',
            )
        if name == "loss" or name.startswith("val_"):
            raise OptionError(
                "A metric cannot be named 'loss' or 'val_...': these names are reserved.",
                received=repr(name),
                fix="Give it another name.",
            )
    return dict(metrics or {})


def _small_form(output: Tree, target: Tree) -> object:
    """A key that shares must have in common to be counted together; None to count one alone.

    Only small and plain outputs are collected: a row of scores and a class for every sample. The
    metric itself reports what is wrong with others.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    rows, classes = output.shape, target.shape
    if len(rows) != 2 or len(classes) != 1 or rows[0] != classes[0]:
        return None
    if rows[0] * rows[1] > _FEW_ELEMENTS or target.is_floating_point():
        return None
    return rows[1], output.dtype, target.dtype, output.device, target.device


def _batches_per_message(seen: Sequence[MetricUpdate]) -> int:
    num_batches = len({one.batch for one in seen})
    num_bytes = sum(tensor.nbytes for tensor in tensors_of([one.tree for one in seen]))
    return max(1, min(_MOST_WAITING, _MESSAGE_BYTES * num_batches // max(num_bytes, 1)))
