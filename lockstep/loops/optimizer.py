"""``CrossReplicaOptimizer``: a torch optimizer that steps on the gradients of all replicas.

It stands where the optimizer stood in a loop of one's own. Each replica goes forward and backward
on its part of the batch; ``step`` sums the gradients, and each replica updates its slice of the
parameters. While backward runs, every gradient that is complete is moved to where the others will
read it, so that ``step`` has nothing left to copy.

It does what ``torch.optim.Optimizer`` promises to schedulers and scripts, by handing on to the
optimizer that it wraps. Gradients are the loop's until ``step`` takes them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

from lockstep.errors import DeviceError, ModelError, OptionError, Problems
from lockstep.loops.gradient_places import GradientPlaces
from lockstep.loops.job import current
from lockstep.loops.replica_update import Contribution, ReplicaUpdate
from lockstep.loops.replicas import check_weight
from lockstep.options import check_count, check_positive
from lockstep.parallel.gradient_rules import GradientRules


class CrossReplicaOptimizer(optim.Optimizer):
    """Wraps a torch optimizer: steps on the gradient of all replicas' samples.

    Making it is a call of all replicas: the first one's parameters become everybody's. On one host
    they lie in one place from then on, so only ``step`` may change them.

    Args:
        optimizer: over the model's parameters. Its options are those of the first replica at each
            step: schedulers may be made over either of the two.
        model: whose other parameters and buffers are made equal, too, and whose names errors say.
        clip_norm: longest gradient, all parameters' together; None for any length.
        accumulate: how many calls of ``step`` make one update.

    Raises:
        OptionError: an argument that cannot be; an optimizer that cannot step so; on all replicas,
            models or optimizers that differ.
        DeviceError: parameters that are not on the CPU.
        ModelError: parameters that share memory without being one Parameter.
        WorkerError: another replica does not come.
    """

    # Says that it steps across replicas by itself (``train.optimizer_checks``).
    is_cross_replica = True

    def __init__(
        self,
        optimizer: optim.Optimizer,
        model: nn.Module | None = None,
        *,
        clip_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        # Not torch's own, which would make parameter groups: those of the optimizer are these.
        _check(optimizer, model, clip_norm, accumulate)
        self._optimizer = optimizer
        self._accumulate = accumulate
        parameters = _named(optimizer, model)
        self._update = ReplicaUpdate(
            current(),
            optimizer,
            parameters,
            _other_values(parameters, model),
            GradientRules(clip_norm=clip_norm, on_nonfinite="ignore"),
        )
        self._frozen = {name: one for name, one in parameters.items() if not one.requires_grad}
        self._trained = self._update.trained
        self._held = _Held(len(self._trained))
        self._is_holding = False
        self._sums = self._update.places
        self._places: GradientPlaces | None = None
        if self._sums is not None:
            self._places = GradientPlaces(self._trained, self._sums)
            self._places.serve(self)
        self._open_places()

    # --- what an optimizer has -------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer that it wraps."""
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer that it wraps."""
        return self._optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What this replica has of the optimizer's state: ``state_dict`` gathers the whole."""
        return self._optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no ``step`` has taken."""
        self._optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not to be had: what replicas share is laid out once.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            "Parameter groups cannot be added to a CrossReplicaOptimizer.",
            received=f"a group of {len(list(param_group.get('params', ())))} parameters",
            fix="Give all parameters to the optimizer before it is wrapped.",
        )

    def __repr__(self) -> str:
        return f"CrossReplicaOptimizer({self._optimizer!r})"

    # --- stepping --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:
        """Update the parameters with the gradients of all replicas; every replica calls it.

        It takes the gradients: afterwards ``.grad`` of the parameters is None.

        Args:
            closure: computes the loss and goes backward; called once.
            weight: of how many samples this replica's gradient is the mean; 0 where it has none,
                and then its gradients may be anything. None on all replicas: equal weights.

        Returns:
            What ``closure`` has returned.

        Raises:
            OptionError: a weight that cannot be, or weights on some replicas only.
            ModelError: a parameter that does not take part has a gradient, or parameters were
                changed or moved by others.
            WorkerError: another replica of this host does not come, or has ended.
            HostError: another host does not come, or has failed.
        """
        if weight is not None:
            check_weight(weight)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._check_frozen()
        now = self._contribution(weight)
        if self._is_holding or self._held.count + 1 < self._accumulate:
            self._held.add(now, self._sums)
        elif self._held.count:
            self._held.add(now, self._sums)
            self._update.make(self._taken())
        else:
            self._update.make(now)
        self._forget_gradients()
        self._open_places()
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block ``step`` adds up gradients; the next one after it updates."""
        before, self._is_holding = self._is_holding, True
        self._open_places()
        try:
            yield
        finally:
            self._is_holding = before
            self._open_places()

    def join(self) -> None:
        """Take part in the updates of others, without samples, until all replicas have joined.

        To be called after a loop that may end earlier on some replicas, on all of them.
        """
        if self._held.count:
            self._update.make(self._taken())
            self._open_places()
        nothing = Contribution(
            gradients=[None] * len(self._trained), factor=0.0, weight=0.0, is_given=True
        )
        while self._update.make(nothing, has_joined=True):
            pass

    def _contribution(self, weight: float | None) -> Contribution:
        """What the last backward pass has left."""
        own = 1.0 if weight is None else float(weight)
        return Contribution(
            gradients=[one.grad if own else None for one in self._trained],
            factor=own,
            weight=own,
            is_given=weight is not None,
        )

    def _taken(self) -> Contribution:
        """What several calls of ``step`` have added up; the next one begins anew."""
        held, self._held = self._held, _Held(len(self._trained))
        return held.total()

    def _open_places(self) -> None:
        """Gradients go where the others read them, unless sums of earlier ones lie there."""
        if self._places is not None:
            self._places.is_open = not (
                self._is_holding or self._accumulate > 1 or self._held.count
            )

    def _forget_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def _check_frozen(self) -> None:
        names = [name for name, one in self._frozen.items() if one.grad is not None]
        if names:
            raise ModelError(
                "Parameters that were frozen when the optimizer was wrapped take no step.",
                received=f"a gradient of {names[0]!r}",
                fix="Set requires_grad before CrossReplicaOptimizer is made.",
            )

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state, as if it had stepped alone; every replica calls it."""
        self._update.gather_slots()
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, be it of any number of replicas; every replica loads the same."""
        self._update.take_state(dict(state_dict))


class _Held:
    """Gradients of several calls of ``step``, added up: sums over samples."""

    def __init__(self, num_parameters: int) -> None:
        self._sums: list[torch.Tensor | None] = [None] * num_parameters
        self._weight = 0.0
        self._kinds: set[bool] = set()
        self.count = 0

    @torch.no_grad()
    def add(self, more: Contribution, places: Any) -> None:
        """Add a contribution; sums are formed in their places, if there are any."""
        self.count += 1
        self._weight += more.weight
        self._kinds.add(more.is_given)
        if len(self._kinds) > 1:
            raise OptionError(
                "Calls of `step` that make one update must all have a weight, or none of them.",
                received="both",
                fix="Use step(weight=len(inputs)) everywhere.",
            )
        for number, gradient in enumerate(more.gradients):
            if gradient is None:
                continue
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            before = self._sums[number]
            if before is not None:
                before.add_(dense, alpha=more.factor)
            elif places is None:
                self._sums[number] = dense * more.factor
            else:
                self._sums[number] = torch.mul(dense, more.factor, out=places[number])

    def total(self) -> Contribution:
        """All that has been added."""
        (is_given,) = self._kinds
        return Contribution(
            gradients=self._sums, factor=1.0, weight=self._weight, is_given=is_given
        )


def _check(optimizer: object, model: object, clip_norm: object, accumulate: object) -> None:
    problems = Problems()
    if not isinstance(optimizer, optim.Optimizer) or isinstance(optimizer, CrossReplicaOptimizer):
        problems.add(
            "`optimizer` must be a torch optimizer.",
            received=type(optimizer).__name__,
            fix="Pass torch.optim.Adam(model.parameters()), for example.",
        )
    if isinstance(optimizer, optim.LBFGS | optim.SparseAdam):
        problems.add(
            "LBFGS evaluates the loss several times per step and SparseAdam needs sparse "
            "gradients: neither fits a step on summed gradients.",
            received=type(optimizer).__name__,
            fix="Use another optimizer, such as torch.optim.AdamW.",
        )
    if model is not None and not isinstance(model, nn.Module):
        problems.add(
            "`model` must be a module, or None.",
            received=type(model).__name__,
            fix="Pass the model whose parameters the optimizer steps.",
        )
    if clip_norm is not None:
        fix = "Use clip_norm=1.0, or leave it out."
        check_positive("clip_norm", clip_norm, problems, fix=fix, may_be_infinite=True)
    fix = "Use accumulate=4 for an update at every fourth call of `step`."
    check_count("accumulate", accumulate, problems, fix=fix)
    problems.raise_if_any(OptionError)


def _named(optimizer: optim.Optimizer, model: nn.Module | None) -> dict[str, nn.Parameter]:
    """What the optimizer steps, by name.

    Raises:
        OptionError: it steps others than the model's.
        DeviceError: one of them is not on the CPU.
    """
    names = {} if model is None else {id(one): name for name, one in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"parameter {place} of group {number}")
            if model is not None and id(parameter) not in names:
                raise OptionError(
                    "The optimizer must hold the model's own parameters.",
                    received=f"{name}, of shape {tuple(parameter.shape)}, which is none of them",
                    fix="Make it from model.parameters().",
                )
            if parameter.device.type != "cpu":
                raise DeviceError(
                    "Replicas exchange gradients of parameters on CPUs.",
                    received=f"{name} on {parameter.device}",
                    fix="Leave the model on the CPU.",
                )
            found[name] = parameter
    return found


def _other_values(
    parameters: Mapping[str, nn.Parameter], model: nn.Module | None
) -> dict[str, torch.Tensor]:
    """What else of the model must be equal: buffers, and what this optimizer does not step."""
    if model is None:
        return {}
    values = {name: one for name, one in model.named_parameters() if name not in parameters}
    return {**values, **dict(model.named_buffers())}
