"""Keras metrics on many ranks: the driver's own objects hold the values of all.

Every rank updates a copy with the outputs it has computed, and rank 0 adds up the states: the
states of Keras's own metrics are sums over samples, but for those that look across samples. Of
these, and of any other metric, one of the user's or a mean over what a function of the user's
returns for a batch, nothing is known. So such a metric is updated on rank 0 alone, with the outputs
of the whole batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from keras import tree
from keras.src.metrics.reduction_metrics import MeanMetricWrapper

from lockstep.data.trees import Tree, map_tensors
from lockstep.errors import ModelError
from lockstep.frontends.keras.reductions import is_of_each_sample, masked
from lockstep.parallel.control import Control
from lockstep.train.metrics import Metrics
from lockstep.units import first_few

# A share's outputs, masks, targets and sample weights.
_Seen = tuple[Tree, Tree, Tree, Tree]


class KerasMetrics(Metrics):
    """The metrics of a compiled model.

    Args:
        compiled: the model's ``CompileMetrics``, built; None where it has no metrics.
        of_layers: metrics that layers have, and update when they are called.
        has_rows: see ``Additions``.

    Attributes:
        are_known: the states of all of them are sums over samples.
    """

    def __init__(
        self, compiled: Any, of_layers: Sequence[Any] = (), *, has_rows: bool = True
    ) -> None:
        super().__init__(None)
        _check_layers(of_layers)
        self._compiled = compiled
        self._of_layers = list(of_layers)
        self.are_known = compiled is None or all(
            _is_sum(metric) and (has_rows or not isinstance(metric, MeanMetricWrapper))
            for metric in compiled.metrics
        )
        self._seen: list[_Seen] = []

    def __bool__(self) -> bool:
        return self._compiled is not None

    def reset(self) -> None:
        self._seen.clear()
        for metric in self._each():
            metric.reset_state()

    def _each(self) -> list[Any]:
        return [*self._of_layers, *([] if self._compiled is None else [self._compiled])]

    def update(self, output: Tree, target: Tree) -> None:
        seen = (output["outputs"], output["masks"], *target)
        if self.are_known:
            self._update(seen)
        else:
            self._seen.append(map_tensors(torch.Tensor.clone, seen))

    def settle(self, control: Control) -> None:
        """After a step, in which all ranks have seen their shares."""
        if self.are_known or not self:
            return
        seen, self._seen = self._seen, []
        gathered = control.gather(seen)
        shares = [share for own in gathered for share in own]
        if shares:
            self._update(tree.map_structure(_joined, *shares))

    @torch.no_grad()
    def _update(self, seen: _Seen) -> None:
        outputs, masks, targets, weights = seen
        outputs = tree.map_structure(masked, outputs, masks)
        self._compiled.update_state(targets, outputs, sample_weight=weights)

    def states(self) -> list[Any]:
        return [
            [variable.value.detach().clone() for variable in metric.variables]
            for metric in self._each()
        ]

    def merge(self, ranks: list[list[Any]]) -> None:
        for metric, *states in zip(self._each(), *ranks, strict=True):
            is_sum = self.are_known or metric in self._of_layers
            for variable, *values in zip(metric.variables, *states, strict=True):
                variable.assign(torch.stack(values).sum(0) if is_sum else values[0])

    def join(self, control: Control) -> None:
        """Have rank 0 hold what all ranks have counted, and the others nothing."""
        counted = [metric for metric in self._each() if self.are_known or metric in self._of_layers]
        if not counted or control.num_ranks == 1:
            return
        variables = [variable for metric in counted for variable in metric.variables]
        ranks = control.gather([variable.value.detach().clone() for variable in variables])
        if control.rank != 0:
            for metric in counted:
                metric.reset_state()
            return
        for variable, *values in zip(variables, *ranks, strict=True):
            variable.assign(torch.stack(values).sum(0))

    @contextmanager
    def joined(self, control: Control) -> Iterator[None]:
        """Within the block rank 0 holds what all ranks have counted; then all have their own."""
        own = self.states()
        self.join(control)
        yield
        self.merge([own])


def _check_layers(metrics: Sequence[Any]) -> None:
    """Metrics of layers see one part of a batch each: they must be sums.

    Raises:
        ModelError: with those that are not known to be.
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
    # A mean over values of samples, and not over numbers of whole batches.
    return not issubclass(kind, MeanMetricWrapper) or is_of_each_sample(
        metric._fn, metric._fn_kwargs
    )


def _joined(*parts: Any) -> Any:
    return None if parts[0] is None else torch.cat(parts)
