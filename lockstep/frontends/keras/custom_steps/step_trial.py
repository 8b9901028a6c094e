"""A trial of custom steps: are gradients, metrics and results means or sums over the samples?

Gradients that a step applies, numbers that it passes to metrics and numbers that it returns must
be means or sums over the samples: only then do the values of the parts of a batch give that of the
batch. The trial compares a few samples with their halves; without it a wrong training would go
unnoticed.

The trial applies and updates nothing. BatchNormalization uses its moving statistics, because in
training those of a batch are of all its samples. Random numbers are the same for the same rows; a
step that mixes rows of several kinds gets the same number in all of them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from keras import tree

from lockstep.capture.state import left_alone
from lockstep.data.map_style.sources import Batch
from lockstep.errors import LossError, ModelError
from lockstep.formatting import first_few
from lockstep.frontends.keras.custom_steps.custom_step import CustomSteps, data_of
from lockstep.frontends.keras.custom_steps.step_calls import StepCalls
from lockstep.frontends.keras.layers.layer_state import check_gradients
from lockstep.frontends.keras.model import KerasModel
from lockstep.parallel.independence.reduction_trial import tolerance_of
from lockstep.parallel.independence.split_trial import on_halves


@dataclass(frozen=True, kw_only=True)
class Call:
    """One of a step's calls, or a number that it returned.

    Attributes:
        key: identifies the call.
        name: describes the call in messages.
        values: gradients or numbers; values with a row for each sample are left out.
    """

    key: tuple[str, object]
    name: str
    values: list[torch.Tensor]


class _Recorder(StepCalls):
    """Records the calls of a step.

    Args:
        module: the model.
        optimizers: a list to which the optimizers that the step applies are added.
    """

    def __init__(self, module: KerasModel, optimizers: list[Any]) -> None:
        super().__init__(module, moments=_moving_statistics)
        self._optimizers = optimizers
        self.calls: list[Call] = []
        self.num_samples = 0
        self._stale_gradients: list[torch.Tensor] = []  # from before the step

    def run(self, name: str, batch: Batch) -> list[Call]:
        """The calls of a step on some samples."""
        self.calls, self.num_samples = [], batch.num_samples
        if name == "train_step":
            self._set_stale_gradients()
        before = self._versions()
        with torch.set_grad_enabled(name == "train_step"), self.intercepted():
            logs = getattr(self.module.model, name)(data_of(batch))
        changed = [name for name, version in self._versions().items() if version != before[name]]
        if changed:
            raise ModelError(
                "A step must change weights through Keras optimizers (optimizer.apply), or assign "
                "them: the devices of a host share one copy.",
                received=f"{first_few(changed)} changed otherwise",
                fix="Use a Keras optimizer, or variable.assign(...).",
            )
        for key, value in (logs or {}).items():
            if not self.is_result(value):
                self._note(("log", key), f"{key!r} of what {name} returns", [value])
        return self.calls

    def _set_stale_gradients(self) -> None:
        """Set gradients, as a step before would leave them, to NaN: a step must clear them."""
        self._stale_gradients = []
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, math.nan)
                self._stale_gradients.append(parameter.grad)

    def _versions(self) -> dict[str, int]:
        return {name: one._version for name, one in self.module.named_parameters()}

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        if not any(one is optimizer for one in self._optimizers):
            self._optimizers.append(optimizer)
        number = [one is optimizer for one in self._optimizers].index(True)
        if any(
            one is left and one.isnan().all() for one in gradients for left in self._stale_gradients
        ):
            raise ModelError(
                "A train_step must clear the gradients of the step before.",
                received="one that adds to them",
                fix="Call self.zero_grad() before loss.backward().",
            )
        values = [gradient.detach().clone() for gradient in gradients]
        name = f"the gradients that the optimizer {optimizer.name!r} is given"
        self.calls.append(Call(key=("apply", number), name=name, values=values))

    def update(self, number: int, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        name = f"what the metric {self.metrics[number].name!r} is given"
        self._note(("metric", number), name, tree.flatten([list(args), dict(named)]))

    def assign(self, name: str, variable: Any, value: torch.Tensor) -> None:
        self.calls.append(Call(key=("assign", name), name=f"a value for {name}", values=[]))

    def _note(self, key: tuple[str, object], name: str, values: Sequence[Any]) -> None:
        numbers = [one for one in map(number_of, values) if one is not None]
        counts = [one for one in numbers if not one.is_floating_point()]
        kept = [one for one in numbers if one.is_floating_point()]
        kept = kept if all(int(one) == self.num_samples for one in counts) else [*kept, *counts]
        self.calls.append(Call(key=key, name=name, values=kept))


def number_of(value: Any) -> torch.Tensor | None:
    """A single number as a tensor; None for anything else."""
    if isinstance(value, bool | str) or value is None:
        return None
    try:
        found = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        return None
    return found if found.dim() == 0 else None


def find_steps(module: KerasModel, name: str, batch: Batch, *, is_divided: bool) -> CustomSteps:
    """What is known of a model's custom steps after a trial on a few samples.

    Args:
        module: the model.
        name: of the step.
        batch: the samples.
        is_divided: True if devices work on parts of a batch; else values may be anything.

    Raises:
        LossError: see ``try_step``.
        ModelError: see ``CustomSteps.check`` and ``check_gradients``.
    """
    if is_divided:
        check_gradients(module)
    custom = CustomSteps.of(module.model)
    module.forget_direct_calls()
    with nullcontext() if is_divided else suppress(LossError):
        try_step(module, name, batch, custom)
    custom.add_built(module.model)
    custom.check()
    return custom


def try_step(module: KerasModel, name: str, batch: Batch, custom: CustomSteps) -> None:
    """Compare the calls of a step on some samples with those on their halves.

    Args:
        module: the model, which is restored.
        name: of the step.
        batch: the samples.
        custom: what is known of the steps; optimizers and sums are added.

    Raises:
        LossError: a value is neither a mean nor a sum over the samples.
    """
    difference = None
    for by_row in (True, False):
        recorder = _Recorder(module, custom.optimizers)
        with left_alone(module, with_trained=True) as state:
            run = partial(recorder.run, name)
            found = on_halves(module, run, batch, state, training=False, draws_by_row=by_row)
        if found is None:
            continue
        difference = _difference(found, batch.num_samples, tolerance_of(module), custom)
        if difference is None:
            return
    if difference is not None:
        raise LossError(
            f"What a {name} computes must be a mean, or a sum, over its samples: each device runs "
            "it on a part of the batch.",
            received=difference,
            fix="Reduce with ops.mean over the samples; give metrics the samples' own values "
            "(update_state(y, y_pred)); or put what compares samples with each other into "
            "compute_loss, which gets the whole batch, and leave train_step out.",
        )


def _moving_statistics(
    layer: Any, inputs: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The moving mean and variance of a BatchNormalization layer."""
    return layer.moving_mean.value.detach(), layer.moving_variance.value.detach()


def _difference(
    runs: Sequence[Sequence[Call]], num_samples: int, tolerance: float, custom: CustomSteps
) -> str | None:
    """Describes a value that is neither a mean nor a sum; None if there is none."""
    whole, *parts = runs
    part = 0.5 if num_samples == 1 else num_samples // 2 / num_samples  # of the first half
    if any([one.key for one in part] != [one.key for one in whole] for part in parts):
        return "other optimizers and metrics, or in another order, for half of the samples"
    for call, first, second in zip(whole, *parts, strict=True):
        if not call.values:
            continue
        pairs = list(zip(first.values, second.values, strict=True))
        means = [part * one + (1 - part) * other for one, other in pairs]
        size = max(map(_norm, (call.values, first.values, second.values)))
        if not math.isfinite(size):
            continue  # an error of its own
        if _distance(call.values, means) <= tolerance * size:
            custom.means.add(call.key)
            continue
        if _distance(call.values, [one + other for one, other in pairs]) <= tolerance * size:
            custom.sums.add(call.key)
            continue
        return f"{call.name}, which is neither for {_compared(call.values, means)}"
    return None


def _compared(values: Sequence[torch.Tensor], means: Sequence[torch.Tensor]) -> str:
    return f"some samples ({_norm(values):.7g}) and their halves ({_norm(means):.7g} on average)"


def _norm(values: Sequence[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(float(one.double().square().sum()) for one in values))


def _distance(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return _norm([one - other for one, other in zip(values, others, strict=True)])
