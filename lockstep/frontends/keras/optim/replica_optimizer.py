"""A Keras optimizer in a custom loop: it steps on the gradients of all replicas.

A loop passes gradients to ``apply``, as to a Keras optimizer, or ``step`` takes them from the
weights. The exchange between replicas is that of torch optimizers (``custom_loops.stepping``); each
replica steps a copy of the optimizer on its slices, as ranks of a fit do
(``frontends.keras.optim.updater``).

Gradients do not move to shared memory during backward, because a loop may keep the tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import torch

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.custom_loops.job import current
from lockstep.custom_loops.replica_update import ReplicaUpdate
from lockstep.custom_loops.stepping import ReplicaSteps, check_steps
from lockstep.errors import CheckpointError, ModelError, OptionError, Problems
from lockstep.frontends.keras.model import KerasModel, module_of
from lockstep.frontends.keras.optim.optimizer_copy import options_of
from lockstep.frontends.keras.optim.updater import KerasUpdater
from lockstep.frontends.keras.scope import check_backend
from lockstep.parallel.data_parallel.gradient_rules import GradientRules
from lockstep.tracebacks import public_methods
from lockstep.train.runtime.shared_options import SharedOptions, options_spec

# Optimizers that wrap others: these cannot step on summed gradients.
_WRAPPERS = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)

# The attribute with the learning rate: a variable, a schedule or a function; a number in a copy.
_RATE = "_learning_rate"


@public_methods
class KerasReplicaOptimizer(ReplicaSteps):
    """See ``CrossReplicaOptimizer``. All other attributes are the Keras optimizer's."""

    def __init__(
        self,
        optimizer: Any,
        model: Any,
        *,
        clip_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        _check(optimizer, model, clip_norm, accumulate)
        module = module_of(model)
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._optimizer = optimizer
        self._variables = _named(optimizer, module)
        update = ReplicaUpdate(
            current(),
            _LoopUpdater(optimizer, self._variables),
            _KerasState(optimizer),
            {name: variable._value for name, variable in self._variables.items()},
            _other_values(optimizer, module, self._variables),
            _facts(optimizer),
            GradientRules(clip_norm=clip_norm, on_nonfinite="ignore"),
        )
        self._begin(update, accumulate)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_optimizer" not in vars(self):
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if name != "learning_rate" and name not in _float_options(self._optimizer):
            raise OptionError(
                "An optimizer that steps across replicas lets only its learning rate and its float "
                "options be set.",
                received=f"{name} = {value!r}",
                fix="Set it before CrossReplicaOptimizer is made.",
            )
        setattr(self._optimizer, name, value)

    def __repr__(self) -> str:
        return f"CrossReplicaOptimizer({self._optimizer!r})"

    # --- stepping --------------------------------------------------------------------------------

    def apply(
        self,
        grads: Sequence[torch.Tensor | None],
        trainable_variables: Iterable[Any] | None = None,
        *,
        weight: float | None = None,
    ) -> None:
        """Update the variables with the gradients of all replicas; every replica calls it.

        Args:
            grads: this replica's, of means over its samples; None where there is none.
            trainable_variables: those that the gradients are of; None is all that the optimizer
                was built with, in that order.
            weight: see ``step``.

        Raises:
            OptionError: as ``step``; gradients of other variables, or not one for each.
        """
        known = self._optimizer._trainable_variables
        variables = list(known if trainable_variables is None else trainable_variables)
        own = {id(variable._value): None for variable in self._variables.values()}
        ids = [id(getattr(variable, "_value", None)) for variable in variables]
        if len(ids) != len(grads) or not own.keys() >= set(ids):
            raise OptionError(
                "`apply` takes a gradient for each of the variables that the optimizer was built "
                "with, or for some of them.",
                received=f"{len(grads)} gradients of {len(ids)} variables, of which "
                f"{sum(one in own for one in ids)} are known",
                fix="Pass model.trainable_variables, and a gradient for each.",
            )
        given = dict(zip(ids, grads, strict=True))
        self._apply([given.get(id(one)) for one in self._update.trained], weight)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[torch.Tensor | None, Any]], weight: float | None = None
    ) -> Any:
        """As ``apply``, of pairs of a gradient and its variable; the count of steps."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables, weight=weight)
        return self._optimizer._iterations

    def step(self, *, weight: float | None = None) -> None:
        """Update with the gradients that backward has left in the weights.

        Args:
            weight: of how many samples this replica's gradient is the mean; 0 where it has none,
                and then its gradients may be anything. None on all replicas: equal weights.
        """
        self._apply([one.grad for one in self._update.trained], weight)

    def _apply(self, gradients: Sequence[torch.Tensor | None], weight: float | None) -> None:
        with torch.no_grad():
            self._add(gradients, weight, scale=self._optimizer.loss_scale_factor or 1.0)

    def zero_grad(self) -> None:
        """Forget gradients that no ``step`` has taken."""
        for variable in self._variables.values():
            variable._value.grad = None

    # --- state -----------------------------------------------------------------------------------

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Give variables their averages, with ``use_ema``; every replica calls it."""
        self._update.gather_slots()
        self._optimizer.finalize_variable_values(var_list)
        self._update.accept_parameters()

    def save_own_variables(self, store: Any) -> None:
        """Write the whole state as Keras does; every replica calls it."""
        self._update.gather_slots()
        self._optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Read a whole state; every replica reads the same."""
        self.load_state_dict({name: torch.as_tensor(store[name]) for name in store.keys()})  # noqa: SIM118  # a group of a file


class _LoopUpdater(KerasUpdater):
    """Steps with the first replica's options, which a script may change at any step.

    Learning rates of schedules and functions are sent as numbers as well.
    """

    def __init__(self, optimizer: Any, variables: Mapping[str, Any]) -> None:
        super().__init__(optimizer, variables)
        self._numbers: dict[str, float] = {}
        self._shared_options: SharedOptions | None = None

    def options_spec(self) -> TensorSpec:
        return options_spec([_float_options(self.optimizer)])

    def share_options(self, tensor: torch.Tensor) -> None:
        self._numbers = _float_options(self.optimizer)
        self._shared_options = SharedOptions([self._numbers], tensor)
        self._set_numbers()

    def publish_options(self) -> None:
        if self._shared_options is not None:
            self._shared_options.write([_float_options(self.optimizer)])

    def step(self) -> None:
        if self._shared_options is not None:
            self._shared_options.read_into([self._numbers])
            self._set_numbers()
        super().step()

    def _set_numbers(self) -> None:
        """Set the numbers in the copies, and the learning rate in this replica's optimizer."""
        rate = self.optimizer._learning_rate
        if isinstance(rate, keras.Variable) and float(rate.value) != self._numbers[_RATE]:
            rate.assign(self._numbers[_RATE])
        if not self.is_known:
            return  # the first replica steps its own
        for copied in filter(None, (self._template, self._active, self._dummy)):
            decays = copied.weight_decay is not None  # None if no variable of this copy decays
            vars(copied).update(self._numbers if decays else _without_decay(self._numbers))


class _KerasState:
    """The whole state of an optimizer, as ``save_own_variables`` writes it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        store: dict[str, Any] = {}
        self._optimizer.save_own_variables(store)
        return {name: torch.as_tensor(value) for name, value in store.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        own, given = _shapes(self.state_dict()), _shapes(state_dict)
        if own != given:
            raise CheckpointError(
                "The optimizer's state must have the same variables as the optimizer.",
                received=f"{len(given)} variables where it has {len(own)}, or of other shapes",
                fix="Make the same optimizer for the same model as when the state was saved.",
            )
        self._optimizer.load_own_variables(state_dict)


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(torch.as_tensor(value).shape) for name, value in state.items()}


def _float_options(optimizer: Any) -> dict[str, float]:
    """The options that may change at every step, by attribute."""
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, float)}
    return {**numbers, _RATE: float(optimizer._get_current_learning_rate())}


def _without_decay(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if name != "weight_decay"}


def _check(optimizer: Any, model: object, clip_norm: object, accumulate: object) -> None:
    check_backend()
    problems = Problems()
    if isinstance(optimizer, _WRAPPERS):
        problems.add(
            "A Keras optimizer that wraps others cannot step across replicas.",
            received=type(optimizer).__name__,
            fix="Wrap each of its optimizers in a CrossReplicaOptimizer.",
        )
    if not isinstance(model, keras.Model):
        problems.add(
            "A Keras optimizer needs the Keras model whose variables it steps.",
            received=f"model={model!r}",
            fix="Use CrossReplicaOptimizer(optimizer, model).",
        )
    check_steps(problems, clip_norm, accumulate)
    problems.raise_if_any(OptionError)


def _named(optimizer: Any, module: KerasModel) -> dict[str, Any]:
    """The variables that the optimizer steps, by name.

    Raises:
        OptionError: some are not the model's.
        ModelError: a gradient overwrites one of them.
    """
    stepped = {id(variable) for variable in optimizer._trainable_variables}
    named = {name: one for name, one in module.variables.items() if id(one) in stepped}
    if len(named) < len(stepped):
        raise OptionError(
            "The optimizer must update the model's own variables.",
            received=f"{len(stepped)} variables, of which {len(named)} are the model's",
            fix="Build it with model.trainable_variables, or leave that to CrossReplicaOptimizer.",
        )
    for name, variable in named.items():
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                "Replicas sum gradients, and cannot sum values that overwrite their variable.",
                received=f"{name!r}, of a layer that computes in float8",
                fix="Do not quantize its layer.",
            )
    return named


def _other_values(
    optimizer: Any, module: KerasModel, stepped: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Other tensors that must be equal: the rest of the model, and the optimizer's variables."""
    own = {name: one.detach() for name, one in module.named_parameters() if name not in stepped}
    kept = {
        f"variable {number} of the optimizer": variable._value.detach()
        for number, variable in enumerate(optimizer.variables)
    }
    return {**own, **dict(module.named_buffers()), **kept}


def _facts(optimizer: Any) -> dict[str, str]:
    """Facts of the optimizer that must be equal on all replicas; numbers are the first one's."""
    changing = {"name", "iterations", "learning_rate", *_float_options(optimizer)}
    options = {name: value for name, value in options_of(optimizer).items() if name not in changing}
    return {"the optimizer": type(optimizer).__name__, "the optimizer's options": str(options)}
