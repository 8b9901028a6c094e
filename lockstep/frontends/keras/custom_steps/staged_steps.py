"""Custom steps in pipelines: the step runs once, on the whole batch.

No rank of a pipeline has all weights, so a step cannot call the model. The stages call it before
the step runs: the step's call of the model on the batch returns their outputs, from which the step
computes a loss of the whole batch (``parallel.loss.whole_batch``). ``loss.backward()`` marks the
number from which the stages go backward, and applying the optimizer is the update that ends every
step. So a step may do each once, in this order. Between the two, gradients are placeholders.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from keras import tree
from keras.src.layers.layer import Layer
from keras.src.trainers.data_adapters.data_adapter_utils import pack_x_y_sample_weight

from lockstep.capture.state import left_alone
from lockstep.data.map_style.sources import Batch, Source
from lockstep.data.trees import Tree
from lockstep.errors import LockstepError, ModelError
from lockstep.frontends.keras.custom_steps.custom_step import CustomSteps
from lockstep.frontends.keras.custom_steps.step_calls import StepCalls, detached
from lockstep.frontends.keras.loss.computed_loss import ComputedLoss, WithoutWeights
from lockstep.frontends.keras.loss.reductions import masked_outputs
from lockstep.frontends.keras.loss.share_losses import Additions
from lockstep.frontends.keras.model import KerasModel, giving_losses
from lockstep.parallel.batch_run import StepBatch
from lockstep.parallel.data_parallel.functional_patch import Redirection
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.loss.share_losses import ONE_LOSS
from lockstep.parallel.worker import Worker
from lockstep.plan.spec import Plan

_calls = Redirection("__call__", Layer)

# Attributes of weights that a step may read, also of weights on other ranks.
_KNOWN = ("device", "dtype", "is_leaf", "ndim", "requires_grad", "shape")

_DATA_PARALLEL = "Or use a data parallel strategy, whose devices run any step."


class StagedStep(ComputedLoss):
    """A step as the loss of a batch: the loss is the number on which the step calls backward.

    Args:
        custom: what is known of the model's steps.
        additions: what layers add.
        module: the model.
    """

    def __init__(self, custom: CustomSteps, additions: Additions, module: KerasModel) -> None:
        compiled = custom.compiled.get("_compile_loss")
        super().__init__(compiled, additions, module, is_divided=True)
        self.loss = compiled  # not a probed copy: it updates its metrics
        self.names, self.parts = (), ONE_LOSS
        self._custom = custom
        self._run: _Run | None = None
        self.is_reporting = False
        self.logs: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None}

    def run_on(self, plan: Plan, rank: int) -> None:
        super().run_on(plan, rank)
        self.is_reporting = rank == (
            0 if plan.pipeline is None else plan.pipeline.stages[-1].ranks[0]
        )

    def try_on(self, batch: Batch, *, training: bool) -> None:
        """Run the step on a few samples, and restore the model.

        Raises:
            ModelError: pipelines cannot run the step.
        """
        module, mode = self._module, self._module.training
        with giving_losses(module, True), left_alone(module, *self.user_losses()):
            module.train(training)
            self.begin(batch.num_samples, 1)
            with torch.set_grad_enabled(training):
                self(module(*batch.inputs), batch)
        module.train(mode)
        module.model.train(mode)

    @property
    def metrics(self) -> list[Any]:
        """The metrics that steps may update."""
        return self._current_run().metrics

    def user_losses(self) -> list[Any]:
        metrics = self.metrics
        variables = [one for metric in metrics for one in metric.variables]
        return [*super().user_losses(), *metrics, *variables]

    def _number(self, model: Any, output: Tree, batch: Batch) -> torch.Tensor:
        data = pack_x_y_sample_weight(output["inputs"], *batch.targets)
        run = self._current_run()
        self.logs = tree.map_structure(detached, run.of(data, masked_outputs(output)))
        return run.number()

    def _current_run(self) -> "_Run":
        if self._run is None:  # in this process
            attributes = vars(self._module.model)
            missing = self._custom.compiled.keys() - attributes.keys()
            attributes.update({name: self._custom.compiled[name] for name in missing})
            self._run = _Run(self._module, self._custom)
        return self._run


class StagedSteps:
    """Runs custom steps on a rank of a pipeline, and gives all ranks the results.

    Args:
        step: the step.
        worker: of this rank.
        control: to the other ranks.
    """

    def __init__(self, step: StagedStep, worker: Worker, control: Control) -> None:
        self._step = step
        self._worker = worker
        self._control = control
        step.run_on(worker.plan, worker.rank)

    def run(self, name: str, source: Source, indices: torch.Tensor, step: int | None) -> Any:
        """Run a step on the batch at ``indices``; returns its logs."""
        if step is None:
            self._worker.evaluate_step(source, indices)
        else:
            self._worker.train_step(StepBatch(source, indices, step))
        return self._share_results()

    def _share_results(self) -> Any:
        """The step's logs, on all ranks; their metrics get the same values."""
        variables = [one for metric in self._step.metrics for one in metric.variables]
        own = None
        if self._step.is_reporting:
            own = (self._step.logs, [one.value.detach() for one in variables])
        gathered = self._control.gather(own)
        results = self._control.broadcast(next((one for one in gathered if one is not None), None))
        logs, values = results
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return logs


class _Gradient(torch.Tensor):
    """A placeholder for the gradient of a weight, which other ranks compute later."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise _refused(
            f"a step that computes with gradients ({func.__name__})",
            "Hand them to the optimizer as they are: it can clip them (clipnorm=1.0).",
        )


class _Run(StepCalls):
    """One run of a step, and the calls that it has made so far.

    Args:
        module: the model.
        custom: what is known of its steps.
    """

    def __init__(self, module: KerasModel, custom: CustomSteps) -> None:
        super().__init__(module)
        self._custom = custom
        self._trained = {id(one.value): one for one in module.model.trainable_weights}
        self._weights = {id(one._value): one.path for one in module.model.weights}
        self._begin(None, None)

    def _begin(self, inputs: Tree, outputs: Tree) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._num_calls = 0
        self._loss: torch.Tensor | None = None
        self._optimizer: Any = None
        # Gradients of the step before: if the step does not clear them, backward adds to them.
        self._gradients: dict[int, Any] = {one: _placeholder() for one in self._trained}

    def of(self, data: Any, outputs: Tree) -> Mapping[str, Any]:
        """Run the step on a batch, with the outputs of the stages; returns its logs."""
        self._begin(data[0] if isinstance(data, tuple) else data, outputs)
        name = "train_step" if self.module.training else "test_step"
        model = self.module.model
        with self.intercepted(), _calls.to(self._call), _Weights(self), _unchanged(model):
            logs = getattr(model, name)(data) or {}
        if self.module.training and self._optimizer is None:
            raise _refused(
                "a train_step that applied no optimizer",
                "Let every train_step call loss.backward() and optimizer.apply once.",
            )
        found: Mapping[str, Any] = logs
        return found

    def number(self) -> torch.Tensor:
        """The loss from which the stages go backward; 0 if the step trains nothing."""
        if self._loss is None:
            return torch.zeros(())
        number = self._loss / (self._optimizer.loss_scale_factor or 1.0)
        self._begin(None, None)
        return number

    # --- what steps do ---------------------------------------------------------------------------

    def _call(self, layer: Any, *args: Any, **named: Any) -> Any:
        if layer is not self.module.model or self._passes_through:
            return _calls.plain(layer, *args, **named)
        self._num_calls += 1
        if self._num_calls > 1:
            raise _refused("a step that calls the model twice", "Call it once in each step.")
        self._check_mode(layer, **named)
        if len(args) != 1 or not _is_same(args[0], self._inputs):
            raise _refused(
                "a step that calls the model on something else than the batch's inputs",
                "Call self(x) with x unchanged; put what changes x into `call`.",
            )
        return self._outputs

    def _check_mode(self, model: Any, training: Any = None, **named: Any) -> None:
        is_asked = model._call_has_training_arg
        if named or (is_asked and bool(training) != self.module.training):
            given = {"training": training, **named}
            raise _refused(
                f"a step that calls the model with {given}",
                f"Call self(x, training={self.module.training}).",
            )

    def backward(self, loss: torch.Tensor, gradient: Any = None, *args: Any, **named: Any) -> None:
        """The step calls ``loss.backward``."""
        if self._loss is not None or gradient is not None or loss.dim():
            raise _refused(
                "a step that calls backward twice, or on something that is not one number",
                "Add up the losses, and call loss.backward() once.",
            )
        if any(one is not None for one in self._gradients.values()):
            raise _refused(
                "a step that adds to the gradients of the step before",
                "Call self.zero_grad() before loss.backward().",
            )
        self._loss = loss
        self._gradients = {one: _placeholder() for one in self._trained}

    def gradient(self, func: Any, weight: torch.Tensor, *value: Any) -> Any:
        """The step reads or sets a weight's gradient."""
        if func.__name__ == "__get__":
            return self._gradients.get(id(weight))
        if value != (None,):
            raise _refused("a step that sets gradients", "Let loss.backward() do so.")
        self._gradients[id(weight)] = None
        return None

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        given = {
            id(one.value): gradient for one, gradient in zip(variables, gradients, strict=True)
        }
        if self._optimizer is not None or self._custom.optimizers != [optimizer]:
            raise _refused("a step that applies several optimizers", "Apply self.optimizer once.")
        if self._loss is None or any(
            given.get(one) is not gradient for one, gradient in self._gradients.items()
        ):
            raise _refused(
                "a step that applies the optimizer to something else than the gradients of all "
                "trainable weights",
                "Call optimizer.apply([v.value.grad for v in self.trainable_weights], "
                "self.trainable_weights) after loss.backward(); set trainable=False on layers that "
                "are not trained.",
            )
        self._optimizer = optimizer

    def update(self, number: int, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.update_metric(number, args, named)

    def assign(self, name: str, variable: Any, value: torch.Tensor) -> None:
        raise _refused(f"a step that assigns {name}", "Assign it in a callback.")


class _Weights(WithoutWeights):
    """Within the block a step cannot use weights; its accesses to gradients go to the run.

    Args:
        run: the step.
    """

    def __init__(self, run: _Run) -> None:
        super().__init__(run.module.model)
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.backward:
            return self._run.backward(*args, **(kwargs or {}))
        if args and id(args[0]) in self._paths:
            attribute = getattr(getattr(func, "__self__", None), "__name__", None)
            if attribute == "grad":
                return self._run.gradient(func, *args[: 1 + (func.__name__ == "__set__")])
            if attribute in _KNOWN:
                return func(*args)
        return super().__torch_function__(func, types, args, kwargs)

    def _refused(self, path: str) -> LockstepError:
        return _refused(
            f"a step that uses {path} directly",
            "Let `call` return all that the loss is computed from, and call self(x, training=...).",
        )


def check_staged(model: Any) -> None:
    """Refuse models whose outputs a step cannot get.

    Raises:
        ModelError: the model has no ``call``, or metrics in its layers.
    """
    if type(model).call is keras.Model.call:
        raise _refused(
            "a model without a `call`",
            "Give it one that returns all that the loss is computed from, and call it in the step.",
        )
    layers = [one for one in model._flatten_layers() if not isinstance(one, keras.Model)]
    if any(one._metrics for one in layers):
        raise _refused("metrics in layers", "Update metrics in the step.")


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Refuse attributes that a step sets: other ranks would not get them."""
    before = dict(vars(model))
    yield
    changed = [
        name
        for name in sorted({*before, *vars(model)})
        if before.get(name, before) is not vars(model).get(name, before)
    ]
    if changed:
        raise _refused(
            f"a step that sets self.{changed[0]}", "Set it in a callback, or use a metric."
        )


def _placeholder() -> torch.Tensor:
    return torch.empty(0).as_subclass(_Gradient)


def _is_same(tensors: Tree, others: Tree) -> bool:
    pairs = list(zip(tree.flatten(tensors), tree.flatten(others), strict=False))
    is_like = len(tree.flatten(tensors)) == len(tree.flatten(others))
    return is_like and all(one is other or _is_equal(one, other) for one, other in pairs)


def _is_equal(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.dtype == other.dtype and torch.equal(one, other)


def _refused(received: str, fix: str) -> ModelError:
    return ModelError(
        "In a pipeline a custom step must call the model once, on the batch's inputs, call "
        "backward once, on a loss of its outputs, and apply one optimizer.",
        received=received,
        fix=f"{fix} {_DATA_PARALLEL}",
    )
