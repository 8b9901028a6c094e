"""A Keras model as the Trainer sees it: a torch module whose layers hold the model's variables.

The layers of a ``KerasModel`` are those of Keras that have variables, under the paths that Keras
gives these. They hold the very Parameters of the variables: what can be trained is a parameter,
what else a layer keeps (moving averages) is a buffer. What is called is the Keras model itself.

Random numbers that layers draw come from torch's stream, which every share has for itself, instead
of Keras's seed generators, from which all shares would get the same.

Not covered: variables that a layer makes after the model was built.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import torch
from keras.src.backend.common.dtypes import PYTHON_DTYPES_MAP
from keras.src.backend.common.masking import get_keras_mask
from keras.src.backend.torch import random as keras_random
from keras.src.layers.normalization.batch_normalization import BatchNormalization
from keras.src.trainers.data_adapters.data_adapter_utils import pack_x_y_sample_weight
from torch.overrides import TorchFunctionMode

from lockstep.capture.layers import BatchLayer, FrontEndModel
from lockstep.capture.sizes import TracedFloat, TracedInt
from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import ModelError
from lockstep.frontends.keras.fit.images import channels_last_in_memory, only_keras_sees
from lockstep.frontends.keras.fit.layout import Layout
from lockstep.frontends.keras.layers.checks import check_model, has_own_loss, has_own_steps
from lockstep.frontends.keras.layers.fast_forward import DirectCalls
from lockstep.frontends.keras.layers.variable_modules import (
    add_layer_module,
    add_module,
    tensor_attributes,
    trainable_variables,
)
from lockstep.frontends.keras.settings import KerasSettings
from lockstep.parallel.data_parallel.batch_moments import global_moments
from lockstep.parallel.data_parallel.batch_norm import global_statistics
from lockstep.parallel.data_parallel.functional_patch import Redirection

_moments = Redirection("_moments", BatchNormalization)
_generators = Redirection("torch_seed_generator", keras_random)
_seeds = Redirection("draw_seed", keras_random)

# Where the functions are that layers compute with.
_SPACES = (keras.ops, keras.src.ops, keras.activations)

# Sizes in a trace are numbers, which Keras knows by their types.
PYTHON_DTYPES_MAP.update({TracedInt: PYTHON_DTYPES_MAP[int], TracedFloat: PYTHON_DTYPES_MAP[float]})


@dataclass
class _Calls:
    """The calls that run: several where shares take turns at batch normalisation.

    Attributes:
        overlap: another call ran at the same time as one that still does.
        direct: how layers can be called without ceremony, where they can.
        turns_images: images need not be copied.
        has_penalties: there may be penalties on weights.
        has_looked: all that is known.
    """

    num_running: int = 0
    overlap: bool = False
    direct: DirectCalls | None = None
    turns_images: bool = False
    has_penalties: bool = True
    has_looked: bool = False

    def look(self, model: Any) -> None:
        """See how a model's layers can be called, if they may have changed since the last look."""
        if not self.has_looked:
            self.direct = DirectCalls.of(model)
            self.turns_images = only_keras_sees(model._flatten_layers())
            self.has_penalties = any(one.regularizer is not None for one in model.weights)
            self.has_looked = True

    def begin(self) -> None:
        """A call begins."""
        self.num_running += 1
        self.overlap |= self.num_running > 1

    def end(self) -> None:
        """A call has ended."""
        self.num_running -= 1
        self.overlap &= self.num_running > 0


class KerasModel(FrontEndModel):
    """A Keras model with all its variables.

    Args:
        model: a built model.
        layout: where samples are for it; within Lockstep they are first.

    Attributes:
        variables: those that can be trained, by the names of their Parameters.
        with_losses: outputs come with the losses that layers have added, see ``forward``.
        predicts: outputs are those of the model's own ``predict_step``.
    """

    def __init__(self, model: Any, layout: Layout = Layout()) -> None:  # noqa: B008  # it is frozen
        super().__init__()
        self.layout = layout
        self._held = (model,)  # in a tuple, or it would be a layer of this one
        self.with_losses = self.predicts = False
        self._calls = _Calls()
        self.variables: dict[str, Any] = {}
        self._batch_layers: list[tuple[Any, BatchLayer]] = []
        for layer in model._flatten_layers():
            holder = add_layer_module(self, layer)
            if isinstance(holder, BatchLayer):
                self._batch_layers.append((layer, holder))
        add_module(self, "constants", tensor_attributes(model))
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for variable in trainable_variables(model):
            self.variables[names[id(variable._value)]] = variable

    @property
    def model(self) -> Any:
        """The Keras model."""
        return self._held[0]

    def model_in_mode(self) -> Any:
        """The Keras model, in training mode if this one is; in stages nobody calls this one."""
        if self.model.training != self.training:
            self.model.train(self.training)
        return self.model

    @property
    def precision(self) -> str:
        """As the Trainer's options have it; Keras's policies say what layers compute in."""
        sizes = {parameter.dtype.itemsize for parameter in self.parameters()}
        is_wide = sizes == {8} if sizes else keras.config.floatx() == "float64"
        return "fp64" if is_wide else "fp32"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_calls": _Calls(), "_settings": KerasSettings.current()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.pop("_settings").apply()
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def forget_direct_calls(self) -> None:
        """Layers may have been changed: see anew how they can be called."""
        self._calls.has_looked = False

    @property
    def has_low_precision(self) -> bool:
        """See ``FrontEndModel``."""
        dtypes = {str(layer.compute_dtype) for layer in self.model._flatten_layers()}
        return bool(dtypes & {"bfloat16", "float16"})

    def outputs_in(self, made: Tree) -> Tree:
        """See ``FrontEndModel``."""
        return made["outputs"] if self.with_losses else made

    def held(self) -> Iterator[Any]:
        """Layers and their metrics, and variables that hold what is no weight of the model."""
        for layer in self.model._flatten_layers():
            yield layer
            yield from layer._metrics
            kept = [getattr(layer, "states", None), [one.variables for one in layer._metrics]]
            variables = keras.tree.flatten(kept)  # Keras does not count these to the layer's own
            yield from (one for one in variables if isinstance(one, keras.Variable))

    @contextmanager
    def watching(self, note: Callable[[str, Any], None]) -> Iterator[None]:
        """See ``FrontEndModel``."""
        layers = list(self.model._flatten_layers())
        before = [vars(layer).get("call") for layer in layers]
        for layer in layers:
            vars(layer)["call"] = partial(_noting, layer, layer.call, note)
        self.forget_direct_calls()
        try:
            yield
        finally:
            self.forget_direct_calls()
            for layer, call in zip(layers, before, strict=True):
                vars(layer).pop("call")
                if call is not None:
                    vars(layer)["call"] = call

    def functions(self) -> Iterator[Any]:
        """See ``FrontEndModel``."""
        kinds = {type(layer) for layer in self.model._flatten_layers()}
        yield from (one for kind in kinds for one in (kind.call, kind.__call__))
        yield from (one for space in _SPACES for one in vars(space).values())

    def forward(self, inputs: Tree) -> Tree:
        """What the model makes of inputs.

        Returns:
            The model's outputs; ``with_losses`` a dict of these as ``"outputs"``, of their masks,
            of the losses that layers have added and the penalties on weights, each repeated for
            every sample beside the number of samples, and of the inputs, where a
            ``compute_loss`` or a step of the model's own gets them.
        """
        model = self.model_in_mode()
        is_watched = bool(torch._C._len_torch_function_stack())
        self._calls.look(model)
        try:
            self._calls.begin()
            with (
                _own_stream(),
                channels_last_in_memory() if self._calls.turns_images else nullcontext(),
                _moments.to(self._moments_of),
                _Unwrapping() if is_watched else nullcontext(),
            ):
                return self._called(inputs, self.layout.inputs(inputs), is_watched=is_watched)
        finally:
            self._calls.end()

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Within the block outputs are those of ``predict_step``, where the model has its own."""
        self.predicts = type(self.model).predict_step is not keras.Model.predict_step
        try:
            yield
        finally:
            self.predicts = False

    @contextmanager
    def stepping(self, moments: Callable[..., Any] | None = None) -> Iterator[None]:
        """Within the block a step of the model's own may run it, as ``forward`` does.

        Args:
            moments: what BatchNormalization layers take for a batch's mean and variance; None is
                those of all shares.
        """
        with _own_stream(), _moments.to(moments or self._moments_of):
            yield

    def _called(self, rows: Tree, inputs: Tree, *, is_watched: bool) -> Tree:
        """Call the model with inputs as it takes them, which are these rows."""
        model, direct = self.model, self._calls.direct
        if direct is not None and not (is_watched or self.predicts) and direct.takes(inputs):
            outputs = direct.run(inputs, training=self.training)
            added = []
        else:
            if self.predicts:
                outputs = model.predict_step(pack_x_y_sample_weight(inputs))
            else:
                mode = {"training": self.training} if model._call_has_training_arg else {}
                outputs = model(inputs, **mode)
            added = [loss for layer in model._flatten_layers() for loss in layer._losses]
        if not self.with_losses:
            return self.layout.output_rows(outputs, rows)
        return self._with_losses(rows, outputs, added)

    def _with_losses(
        self, inputs: Tree, outputs: Tree, added: list[torch.Tensor]
    ) -> dict[str, Any]:
        if added and self._calls.overlap:  # a layer keeps the losses of the last call only
            raise ModelError(
                "Layers that add losses, beside BatchNormalization, need a device for each "
                "share of a batch.",
                received=f"several shares on one device, and {len(added)} losses",
                fix="Leave num_shares out.",
            )
        penalties = self.model._get_regularization_losses() if self._calls.has_penalties else []
        found = {
            "outputs": self.layout.output_rows(outputs, inputs),
            "masks": self.layout.output_rows(
                keras.tree.map_structure(get_keras_mask, outputs), inputs
            ),
            "losses": [],
            "penalties": [],
        }
        if added or penalties:
            # Keras takes sums of what is no number. No look at sizes, which traces dislike.
            first: Any = next(tensors_of(inputs))
            ones = torch.ones_like(
                first[(slice(None), *(0,) * (first.dim() - 1))], dtype=torch.float64
            )
            found["losses"] = [torch.sum(one).expand_as(ones) for one in added]
            found["penalties"] = [torch.sum(one).expand_as(ones) for one in penalties]
            found["sizes"] = ones.sum().expand_as(ones)
        takes_inputs = has_own_loss(self.model) or has_own_steps(self.model)
        return {**found, "inputs": inputs} if takes_inputs else found

    def _moments_of(
        self, layer: Any, inputs: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of a batch as a BatchNormalization layer takes them: of all shares."""
        statistics = global_statistics()
        holder = next((one for known, one in self._batch_layers if known is layer), None)
        if statistics is None or holder is None:
            plain: tuple[torch.Tensor, torch.Tensor] = _moments.plain(layer, inputs, mask)
            return plain
        weights, epsilon = None, 0.0
        if mask is not None:
            weights = mask.unsqueeze(-1).expand_as(inputs)
            epsilon = keras.config.epsilon()
        dims = list(layer._reduction_axes)
        return global_moments(inputs, dims, statistics.of(holder), weights, epsilon)


def _noting(
    layer: Any, call: Callable[..., Any], note: Callable[[str, Any], None], *args: Any, **named: Any
) -> Any:
    """Call a layer, and tell what it returns."""
    output = call(*args, **named)
    note(f"layer {layer.path or layer.name!r} ({type(layer).__name__})", output)
    return output


def module_of(model: Any, layout: Layout = Layout()) -> KerasModel:  # noqa: B008  # as above
    """The module of a model that is only to be looked at.

    Raises:
        ModelError: it is not built, or has a step of its own.
    """
    check_model(model)
    if not model.built:
        raise ModelError(
            "The model must be built: its variables depend on the shape of its inputs.",
            received=f"the model {model.name!r}, which is not built",
            fix="Begin it with a keras.Input, or call it once.",
        )
    return KerasModel(model, layout)


@contextmanager
def giving_losses(module: KerasModel, gives: bool) -> Iterator[None]:
    """Within the block a model's outputs come with losses, or do not; blocks may be nested."""
    before, module.with_losses = module.with_losses, gives
    try:
        yield
    finally:
        module.with_losses = before


def is_model_of(module: KerasModel, model: Any) -> bool:
    """Whether a model has still the variables that its module was made with."""
    found = [*trainable_variables(model)]
    own = module.variables.values()
    return (
        module.model is model
        and len(found) == len(own)
        and all(one is other for one, other in zip(found, own, strict=True))
    )


@contextmanager
def _own_stream() -> Iterator[None]:
    """Within the block Keras draws from torch's stream, in this thread."""
    with _generators.to(_no_generator), _seeds.to(_drawn_seed):
        yield


class _Unwrapping(TorchFunctionMode):
    """Where something watches torch's functions, it sees tensors and no variables of Keras."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = {name: _unwrapped(value) for name, value in (kwargs or {}).items()}
        return func(*map(_unwrapped, args), **named)


def _unwrapped(value: Any) -> Any:
    """A variable's tensor; a list that Keras keeps track of as a plain one."""
    if isinstance(value, keras.Variable):
        return value.value
    return list(map(_unwrapped, value)) if isinstance(value, list) else value


def _no_generator(seed: Any) -> None:
    """What draws with no generator draws from torch's stream."""


def _drawn_seed(seed: Any) -> torch.Tensor:
    return torch.randint(1 << 31, (2,))
