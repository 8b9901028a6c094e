"""Keras metrics on many ranks: rank 0's own objects get the values of all.

The states of Keras's own metrics are sums over samples, except for metrics that compare samples.
Every rank has sums for each of its shares, and rank 0 adds them up in the tree of all sums
(``plan.program.sum_tree``), so values have the same bits on any number of ranks. The states of
other metrics are unknown: those that compare samples, the user's own, and means over results of a
user's function for a batch. Only rank 0 updates these, with the outputs of the whole batch
(``train.logging.metrics``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from keras import tree
from keras.src.metrics.reduction_metrics import MeanMetricWrapper

from lockstep.data.trees import Tree
from lockstep.errors import ModelError
from lockstep.formatting import first_few
from lockstep.frontends.keras.loss.reductions import is_of_each_sample, masked
from lockstep.parallel.batch_run import ShareOutput
from lockstep.parallel.exchange.control import Control
from lockstep.plan.program.sum_tree import tree_sum
from lockstep.train.logging.metrics import Metrics, MetricUpdate

# A share's outputs, masks, targets and sample weights.
_BatchValues = tuple[Tree, Tree, Tree, Tree]


class KerasMetrics(Metrics):
    """The metrics of a compiled model.

    Args:
        compiled: the model's ``CompileMetrics``, built; None where it has no metrics.
        of_layers: metrics of layers, which update them when they are called.
        has_rows: see ``Additions``.

    Attributes:
        are_sums_known: True if the states of all are sums over samples.
    """

    def __init__(
        self, compiled: Any, of_layers: Sequence[Any] = (), *, has_rows: bool = True
    ) -> None:
        super().__init__(None)
        _check_layers(of_layers)
        self._compiled = compiled
        self._of_layers = list(of_layers)
        self.are_sums_known = compiled is None or all(
            _is_sum(metric) and (has_rows or not isinstance(metric, MeanMetricWrapper))
            for metric in compiled.metrics
        )
        self._shares: dict[int, list[torch.Tensor]] = {}  # by share, its sums
        self._resumed: dict[int, list[torch.Tensor]] = {}  # sums to continue, of all ranks

    def __bool__(self) -> bool:
        return self._compiled is not None

    def reset(self) -> None:
        super().reset()
        self._shares.clear()
        self._resumed.clear()
        for metric in self._each():
            metric.reset_state()

    def _each(self) -> list[Any]:
        return [*self._of_layers, *([] if self._compiled is None else [self._compiled])]

    # --- shares and batches ----------------------------------------------------------------------

    def update(self, part: ShareOutput) -> None:
        seen = (part.output["outputs"], part.output["masks"], *part.target)
        if not self.are_sums_known:
            self._keep(part, [], seen)
            return
        with _holding(self._compiled.variables, self._sums_of(part.share)):
            self._update(seen)

    def _sums_of(self, share: int) -> list[torch.Tensor]:
        if share not in self._shares:
            zeros = [torch.zeros_like(one.value.detach()) for one in self._compiled.variables]
            self._shares[share] = self._resumed.pop(share, zeros)
        return self._shares[share]

    @property
    def _needs_batches(self) -> bool:
        return not self.are_sums_known

    def _update_batch(self, batch: int, shares: Sequence[MetricUpdate]) -> None:
        self._update(tree.map_structure(_joined, *(one.tree for one in shares)))

    @torch.no_grad()
    def _update(self, seen: _BatchValues) -> None:
        outputs, masks, targets, weights = seen
        outputs = tree.map_structure(masked, outputs, masks)
        self._compiled.update_state(targets, outputs, sample_weight=weights)

    # --- ranks -----------------------------------------------------------------------------------

    def join(self, control: Control) -> None:
        """Give rank 0's metrics the values of all ranks."""
        if self._needs_batches:
            self._gather(control)
        elif self:
            sums = [*self._sums_of_all(control).items()]
            for number, variable in enumerate(self._compiled.variables if sums else ()):
                variable.assign(tree_sum({share: own[number] for share, own in sums}))
        self._join_layers(control)

    def _sums_of_all(self, control: Control) -> dict[int, list[torch.Tensor]]:
        """The sums of each share, on rank 0; with a shared queue, several ranks have some."""
        found: dict[int, list[torch.Tensor]] = {}
        for own in control.gather(self._shares):
            for share, sums in own.items():
                before = found.get(share)
                found[share] = sums if before is None else list(map(torch.add, before, sums))
        return {**self._resumed, **found} if control.rank == 0 else {}

    def _join_layers(self, control: Control) -> None:
        """Add up the metrics of layers, which every rank has counted for its samples."""
        if not self._of_layers or control.num_ranks == 1:
            return
        ranks = control.gather(_values_of(self._of_layers))
        if control.rank != 0:
            for metric in self._of_layers:
                metric.reset_state()
        else:
            columns = [zip(*own, strict=True) for own in zip(*ranks, strict=True)]
            assign_each(
                self._of_layers, [[torch.stack(one).sum(0) for one in own] for own in columns]
            )

    @contextmanager
    def joined(self, control: Control) -> Iterator[None]:
        """Within the block rank 0 has the values of all ranks; then each has its own again."""
        own = _values_of(self._of_layers)
        self.join(control)
        yield
        assign_each(self._of_layers, own)

    def states(self, control: Control) -> Tree:
        with self.joined(control):
            shares = [list(one) for one in self._sums_of_all(control).items()] if self else []
            return {"shares": shares, "values": _values_of(self._each())}

    def go_on_from(self, states: Tree, control: Control) -> None:
        self._resumed = dict(states["shares"])
        if control.rank == 0:
            assign_each(self._each(), states["values"])


@contextmanager
def _holding(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within the block variables lie in other memory."""
    before = [variable._value.data for variable in variables]
    for variable, value in zip(variables, values, strict=True):
        variable._value.data = value
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value.data = value


def _values_of(metrics: Sequence[Any]) -> list[list[torch.Tensor]]:
    return [[one.value.detach().clone() for one in metric.variables] for metric in metrics]


def assign_each(metrics: Sequence[Any], values: Sequence[Sequence[torch.Tensor]]) -> None:
    """Assign values to metrics, one for each variable."""
    for metric, own in zip(metrics, values, strict=True):
        for variable, value in zip(metric.variables, own, strict=True):
            variable.assign(value)


def _check_layers(metrics: Sequence[Any]) -> None:
    """Check that metrics of layers, which see parts of a batch, are sums.

    Raises:
        ModelError: with those that may be something else.
    """
    foreign = [metric.name for metric in metrics if not _is_sum(metric)]
    if foreign:
        raise ModelError(
            "A metric that a layer updates must be one of Keras's own: every device counts its "
            "part of a batch, and the counts are added up.",
            received=first_few(foreign),
            fix="Use keras.metrics.Mean or Sum in the layer, or pass the metric to compile.",
        )


def _is_sum(metric: Any) -> bool:
    """Whether a metric's state is a sum over samples: Keras's own are."""
    kind = type(metric)
    if not kind.__module__.startswith("keras.src.metrics."):
        return False
    if metric._metrics:
        return False
    # A mean over values of samples, not over numbers of whole batches.
    return not issubclass(kind, MeanMetricWrapper) or is_of_each_sample(
        metric._fn, metric._fn_kwargs
    )


def _joined(*parts: Any) -> Any:
    return None if parts[0] is None else torch.cat(parts)
