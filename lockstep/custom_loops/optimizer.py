"""A torch optimizer that steps on the gradients of all replicas.

It stands where the optimizer stood in a loop of one's own. Each replica goes forward and backward
on its part of the batch; ``step`` sums the gradients, and each replica updates its slice of the
parameters. While backward runs, every gradient that is complete is moved to where the others will
read it, so that ``step`` has nothing left to copy.

It does what ``torch.optim.Optimizer`` promises to schedulers and scripts, by handing on to the
optimizer that it wraps. Gradients are the loop's until ``step`` takes them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn, optim
from torch.nn.parameter import is_lazy

from lockstep.custom_loops.gradient_places import GradientPlaces
from lockstep.custom_loops.job import current
from lockstep.custom_loops.replica_update import ReplicaUpdate
from lockstep.custom_loops.stepping import ReplicaSteps, check_steps
from lockstep.errors import ModelError, OptionError, Problems
from lockstep.formatting import first_few
from lockstep.parallel.data_parallel.gradient_rules import GradientRules
from lockstep.parallel.storage.store import check_attributes
from lockstep.tracebacks import public_methods
from lockstep.train.optim.optimizer_state import option_values
from lockstep.train.optim.updaters import TorchUpdater


@public_methods
class TorchReplicaOptimizer(ReplicaSteps, optim.Optimizer):
    """``CrossReplicaOptimizer`` for torch optimizers."""

    # A GradScaler calls ``step`` even if this replica's gradients overflow, with these set: else
    # the other replicas would wait for it.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | float = 1.0
    found_inf: torch.Tensor | int = 0

    def __init__(
        self,
        optimizer: optim.Optimizer,
        model: nn.Module | None = None,
        *,
        clip_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        # Without optim.Optimizer.__init__, which would make other parameter groups.
        _check(optimizer, model, clip_norm, accumulate)
        self._optimizer = optimizer
        # Hooks of a state get the wrapped optimizer, hooks of a step this one.
        states = {name: own for name, own in vars(optimizer).items() if "_state_dict_" in name}
        self.__setstate__(states)  # makes what torch's methods for hooks need
        self._places: GradientPlaces | None = None
        parameters = _named(optimizer, model)
        check_embeddings(model, current().num_replicas)
        if model is not None:
            check_attributes(model)
        update = ReplicaUpdate(
            current(),
            TorchUpdater(optimizer, parameters, changes_by_step=True),
            optimizer,
            parameters,
            _other_values(parameters, model),
            _facts(optimizer, parameters),
            GradientRules(clip_norm=clip_norm, on_nonfinite="ignore"),
        )
        self._begin(update, accumulate)
        if update.places is not None:
            self._places = GradientPlaces(update.trained, update.places)
            self._places.serve(self)
        self._update_places()

    # --- attributes of an optimizer --------------------------------------------------------------

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
        """The optimizer's state, on one replica; ``state_dict`` gathers it from several.

        Raises:
            OptionError: there are several replicas.
        """
        if current().num_replicas > 1:
            raise OptionError(
                "Of the optimizer's state each replica has only the slices that it updates.",
                received=f"a use of optimizer.state on {current().num_replicas} replicas",
                fix="Read what state_dict() returns; to change it, give it to load_state_dict(). "
                "Every replica calls both.",
            )
        return self._optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients since the last ``step``."""
        self._optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: the shared memory is laid out once.

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

        Afterwards ``.grad`` of the parameters is None. Under a ``torch.amp.GradScaler`` all
        replicas skip the update if the gradients of one have overflowed.

        Args:
            closure: computes the loss and goes backward; called once.
            weight: the number of samples of which this replica's gradient is the mean; 0 without
                samples, and then its gradients may be anything. None on all replicas: equal
                weights.

        Returns:
            The result of ``closure``.

        Raises:
            OptionError: an invalid weight, or weights on some replicas only.
            ModelError: a frozen parameter has a gradient, or other code changed or moved
                parameters.
            WorkerError: another replica of this host is too late, or has ended.
            HostError: another host is too late, or has failed.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._add(
            [one.grad for one in self._update.trained],
            weight,
            scale=float(self.grad_scale),
            is_finite=not self.found_inf,
        )
        return result

    def _update_places(self) -> None:
        """Write gradients to their places, unless the places hold accumulated gradients."""
        if self._places is not None:
            self._places.is_open = not self._will_accumulate


def _check(optimizer: object, model: object, clip_norm: object, accumulate: object) -> None:
    problems = Problems()
    if not isinstance(optimizer, optim.Optimizer) or isinstance(optimizer, ReplicaSteps):
        problems.add(
            "`optimizer` must be a torch optimizer.",
            received=type(optimizer).__name__,
            fix="Pass torch.optim.Adam(model.parameters()), for example.",
        )
    if isinstance(optimizer, optim.LBFGS | optim.SparseAdam):
        problems.add(
            "LBFGS and SparseAdam cannot step on summed gradients: LBFGS evaluates the loss "
            "several times per step, SparseAdam needs sparse gradients.",
            received=type(optimizer).__name__,
            fix="Use another optimizer, such as torch.optim.AdamW.",
        )
    if model is not None and not isinstance(model, nn.Module):
        problems.add(
            "`model` must be a module, or None.",
            received=type(model).__name__,
            fix="Pass the model whose parameters the optimizer steps.",
        )
    check_steps(problems, clip_norm, accumulate)
    problems.raise_if_any(OptionError)


def _named(optimizer: optim.Optimizer, model: nn.Module | None) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name.

    Raises:
        OptionError: some are not the model's.
        ModelError: some are lazy.
    """
    names = {} if model is None else {id(one): name for name, one in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"parameter {place} of group {number}")
            if model is not None and id(parameter) not in names:
                raise OptionError(
                    "The optimizer must hold the model's own parameters.",
                    received=f"{name}, of shape {tuple(parameter.shape)}, which the model does "
                    "not have",
                    fix="Make it from model.parameters().",
                )
            if is_lazy(parameter):
                raise ModelError(
                    "The shapes of all parameters must be known.",
                    received=f"{name}, a lazy parameter",
                    fix="Call the model once on a sample first.",
                )
            found[name] = parameter
    return found


def check_embeddings(model: nn.Module | None, num_replicas: int) -> None:
    """Refuse embeddings whose gradients depend on the other samples of a batch.

    Raises:
        ModelError: with their names.
    """
    modules = [] if model is None or num_replicas == 1 else list(model.named_modules())
    names = [name for name, one in modules if getattr(one, "scale_grad_by_freq", False)]
    if names:
        raise ModelError(
            "scale_grad_by_freq needs a row's frequency in the whole batch, but each replica has "
            "only a part of it.",
            received=f"scale_grad_by_freq=True for {first_few(names)}",
            fix="Leave it out, or train on one replica.",
        )


def _other_values(
    parameters: Mapping[str, nn.Parameter], model: nn.Module | None
) -> dict[str, torch.Tensor]:
    """The model's other tensors that must be equal: buffers, and other parameters."""
    if model is None:
        return {}
    values = {name: one for name, one in model.named_parameters() if name not in parameters}
    return {**values, **dict(model.named_buffers())}


def _facts(optimizer: optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The facts of the optimizer that must be equal on all replicas."""
    state = {
        name: sorted(map(str, optimizer.state[one]))
        for name, one in parameters.items()
        if one in optimizer.state
    }
    return {
        "the optimizer": type(optimizer).__name__,
        "the optimizer's options": str([option_values(one) for one in optimizer.param_groups]),
        "the optimizer's state": str(state),
    }
