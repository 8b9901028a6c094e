"""The loss of a model with a ``compute_loss`` of its own, which gets the whole batch.

As in Keras it gets inputs, targets, outputs and weights of all samples, ``self.losses`` and the
compiled losses. Every rank that has outputs calls it; its updates of metrics count once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import LossError
from lockstep.frontends.keras.layers.checks import has_custom_loss
from lockstep.frontends.keras.layers.dry_run import metrics_of_layers, values_restored
from lockstep.frontends.keras.loss.reductions import masked_outputs
from lockstep.frontends.keras.loss.share_losses import Additions, KerasLoss
from lockstep.frontends.keras.model import KerasModel
from lockstep.parallel.loss.share_losses import ONE_LOSS, ShareLoss
from lockstep.plan.spec import Plan


class ComputedLoss(KerasLoss):
    """The loss that ``compute_loss`` returns.

    Args:
        compiled: the model's ``CompileLoss``, built, or None.
        additions: losses that layers add.
        module: the model.
        is_divided: True if devices work on parts of a batch.
    """

    _counts, _has_weights = True, True

    def __init__(
        self, compiled: Any, additions: Additions, module: KerasModel, *, is_divided: bool
    ) -> None:
        super().__init__(compiled, additions)
        self._module = module
        self.is_certain, self.uses_whole_batch, self.parts = False, is_divided, ONE_LOSS

    def run_on(self, plan: Plan, rank: int) -> None:
        super().run_on(plan, rank)
        last = None if plan.pipeline is None else plan.pipeline.stages[-1].ranks
        self._has_weights = last is None
        # Updates of metrics count on the rank that has the first share.
        self._counts = rank == (last[0] if last else 0)

    def __call__(self, output: Tree, batch: Batch) -> ShareLoss:
        num_samples = batch.num_samples
        model, added = self._module.model_in_mode(), self.added(output, num_samples)
        numbers = [
            (seed * rows).sum() / num_samples
            for seed, rows in zip(added.seeds, added.values, strict=True)
        ]
        self._probe.sees_all, self._probe.found = True, []
        with _as_called(model, self.loss, numbers, counts=self._counts):
            number = self._number(model, output, batch)
        weight = float(num_samples)
        own = [number, *(one.number for one in self._probe.found)]
        own += [torch.zeros(())] * (1 + len(self.names) - len(own))
        parts = tuple((weight * one.item(), weight) for one in own)
        return ShareLoss(
            values=(number,),
            seeds=(weight,),
            total=parts[0][0],
            weight=weight,
            parts=parts if self.names else (),
        )

    def _number(self, model: Any, output: Tree, batch: Batch) -> torch.Tensor:
        """The result of the model's ``compute_loss``."""
        targets, weights = batch.targets
        with nullcontext() if self._has_weights else _WithoutWeights(model):
            number: torch.Tensor = model._compute_loss(
                x=output["inputs"],
                y=targets,
                y_pred=masked_outputs(output),
                sample_weight=weights,
                training=model.training,
            )
        return number


def loss_of(module: KerasModel, additions: Additions, *, is_divided: bool) -> KerasLoss:
    """The loss of a model as it is compiled.

    Args:
        module: the model.
        additions: losses that layers add.
        is_divided: see ``KerasLoss``.
    """
    compiled = module.model._compile_loss
    if has_custom_loss(module.model):
        return ComputedLoss(compiled, additions, module, is_divided=is_divided)
    return KerasLoss(compiled, additions, is_divided=is_divided)


class _WithoutWeights(TorchFunctionMode):
    """Within the block using the model's weights is an error: other stages have them.

    Args:
        model: the model.

    Raises:
        LossError: a weight is used.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._paths = {id(one.value): one.path for one in model.weights}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in tensors_of([list(args), dict(kwargs or {})]):
            if id(tensor) in self._paths:
                raise LossError(
                    "In a pipeline the last stage computes the loss, and has only its own weights.",
                    received=f"a compute_loss that uses {self._paths[id(tensor)]}",
                    fix="Compute it from the outputs, or use a data parallel strategy.",
                )
        return func(*args, **(kwargs or {}))


@contextmanager
def _as_called(
    model: Any, compiled: Any, added: Sequence[torch.Tensor], *, counts: bool
) -> Iterator[None]:
    """Within the block a model has the losses of a batch, as just after a call on the batch.

    Args:
        model: the model.
        compiled: its ``CompileLoss``.
        added: losses of its layers.
        counts: True if its metrics keep their updates.
    """
    own = vars(model)
    before = own.get("_compile_loss"), own["_losses_override"]
    metrics = [] if counts else metrics_of_layers(model)
    own.update(_compile_loss=compiled, _losses_override=[*added])
    try:
        with values_restored(one for metric in metrics for one in metric.variables):
            yield
    finally:
        own.update(_compile_loss=before[0], _losses_override=before[1])
