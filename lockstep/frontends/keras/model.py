"""A Keras model as a torch module whose layers hold the model's variables.

The layers of a ``KerasModel`` are the Keras layers that have variables, under Keras's paths. They
hold the Parameters of the variables themselves: trainable variables are parameters, other state of
a layer (moving averages) is a buffer. A call calls the Keras model itself.

Layers draw random numbers from torch's stream, which every share seeds for itself, instead of
Keras's seed generators, which would give all shares the same numbers.

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
from lockstep.frontends.keras.layers.checks import check_model, has_custom_loss
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

# Modules with the functions that layers use.
_SPACES = (keras.ops, keras.src.ops, keras.activations)

# Sizes in a trace are numbers, which Keras recognises by type.
PYTHON_DTYPES_MAP.update({TracedInt: PYTHON_DTYPES_MAP[int], TracedFloat: PYTHON_DTYPES_MAP[float]})


@dataclass
class _Calls:
    """The running calls of a model: several if shares take turns at batch normalisation.

    Attributes:
        num_running: how many run.
        overlap: True if one of them has run at the same time as another.
        direct: calls layers without Keras's work around them; None if the model needs that.
        keeps_images: True if images need not be copied.
        has_penalties: True if there may be penalties on weights.
        is_analysed: True if the three attributes before are known.
    """

    num_running: int = 0
    overlap: bool = False
    direct: DirectCalls | None = None
    keeps_images: bool = False
    has_penalties: bool = True
    is_analysed: bool = False

    def analyse(self, model: Any) -> None:
        """Find how to call a model's layers, if they may have changed."""
        if not self.is_analysed:
            self.direct = DirectCalls.of(model)
            self.keeps_images = only_keras_sees(model._flatten_layers())
            self.has_penalties = any(one.regularizer is not None for one in model.weights)
            self.is_analysed = True

    def begin(self) -> None:
        """Count a call that begins."""
        self.num_running += 1
        self.overlap |= self.num_running > 1

    def end(self) -> None:
        """Count a call that has ended."""
        self.num_running -= 1
        self.overlap &= self.num_running > 0


class KerasModel(FrontEndModel):
    """A Keras model with all its variables.

    Args:
        model: a built model.
        layout: where it has samples; within Lockstep they are first.

    Attributes:
        variables: those that can be trained, by the names of their Parameters.
        with_losses: True if ``forward`` also returns the losses that layers add.
        predicts: True if outputs are those of the model's own ``predict_step``.
    """

    def __init__(self, model: Any, layout: Layout = Layout()) -> None:  # noqa: B008  # it is frozen
        super().__init__()
        self.layout = layout
        self._model_tuple = (model,)  # in a tuple, so that torch does not register it
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
        return self._model_tuple[0]

    def model_in_mode(self) -> Any:
        """The Keras model in this module's mode, which pipeline stages would not set."""
        if self.model.training != self.training:
            self.model.train(self.training)
        return self.model

    @property
    def precision(self) -> str:
        """One of the Trainer's options; Keras's dtype policies decide what layers compute in."""
        sizes = {parameter.dtype.itemsize for parameter in self.parameters()}
        # Of several dtypes, as with LoRA's float32 beside float64, Keras passes data in floatx.
        is_mixed = not sizes or (len(sizes) > 1 and 8 in sizes)
        is_wide = keras.config.floatx() == "float64" if is_mixed else sizes == {8}
        return "fp64" if is_wide else "fp32"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_calls": _Calls(), "_settings": KerasSettings.current()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.pop("_settings").apply()
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def forget_direct_calls(self) -> None:
        """Analyse at the next call how to call layers: these may have changed."""
        self._calls.is_analysed = False

    @property
    def has_low_precision(self) -> bool:
        """See ``FrontEndModel``."""
        dtypes = {str(layer.compute_dtype) for layer in self.model._flatten_layers()}
        return bool(dtypes & {"bfloat16", "float16"})

    def outputs_in(self, made: Tree) -> Tree:
        """See ``FrontEndModel``."""
        return made["outputs"] if self.with_losses else made

    def held(self) -> Iterator[Any]:
        """Layers, their metrics, and variables that are no weights of the model."""
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
            vars(layer)["call"] = partial(_call_and_note, layer, layer.call, note)
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
        """Call the model.

        Returns:
            The model's outputs; ``with_losses`` a dict of these as ``"outputs"``, their masks, the
            losses that layers add and the penalties on weights, each repeated for every sample
            beside the number of samples, and the inputs, if a ``compute_loss`` or a step of the
            model's own needs them.
        """
        model = self.model_in_mode()
        is_watched = bool(torch._C._len_torch_function_stack())
        self._calls.analyse(model)
        try:
            self._calls.begin()
            with (
                _torch_random_stream(),
                channels_last_in_memory() if self._calls.keeps_images else nullcontext(),
                _moments.to(self._moments_of),
                _Unwrapping() if is_watched else nullcontext(),
            ):
                return self._called(inputs, self.layout.inputs(inputs), is_watched=is_watched)
        finally:
            self._calls.end()

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Within the block outputs are those of ``predict_step``, if the model has its own."""
        self.predicts = type(self.model).predict_step is not keras.Model.predict_step
        try:
            yield
        finally:
            self.predicts = False

    @contextmanager
    def stepping(self, moments: Callable[..., Any] | None = None) -> Iterator[None]:
        """Within the block a custom step may call the model, as ``forward`` does.

        Args:
            moments: gives BatchNormalization layers a batch's mean and variance; None is those of
                all shares.
        """
        with _torch_random_stream(), _moments.to(moments or self._moments_of):
            yield

    def _called(self, rows: Tree, inputs: Tree, *, is_watched: bool) -> Tree:
        """Call the model with inputs as it takes them; ``rows`` are the same, samples first."""
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
            # Keras sums values that are not one number. Reading sizes would disturb traces.
            first: Any = next(tensors_of(inputs))
            ones = torch.ones_like(
                first[(slice(None), *(0,) * (first.dim() - 1))], dtype=torch.float64
            )
            found["losses"] = [torch.sum(one).expand_as(ones) for one in added]
            found["penalties"] = [torch.sum(one).expand_as(ones) for one in penalties]
            found["sizes"] = ones.sum().expand_as(ones)
        return {**found, "inputs": inputs} if has_custom_loss(self.model) else found

    def _moments_of(
        self, layer: Any, inputs: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean and variance of a batch for a BatchNormalization layer: of all shares."""
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


def _call_and_note(
    layer: Any, call: Callable[..., Any], note: Callable[[str, Any], None], *args: Any, **named: Any
) -> Any:
    """Call a layer, and note what it returns."""
    output = call(*args, **named)
    note(f"layer {layer.path or layer.name!r} ({type(layer).__name__})", output)
    return output


def module_of(model: Any, layout: Layout = Layout()) -> KerasModel:  # noqa: B008  # as above
    """The module of a model, which is not changed for it.

    Raises:
        ModelError: the model is not built, or ``check_model`` refuses it.
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
    """Within the block a model's outputs come with losses, or without; blocks may be nested."""
    before, module.with_losses = module.with_losses, gives
    try:
        yield
    finally:
        module.with_losses = before


def is_model_of(module: KerasModel, model: Any) -> bool:
    """Whether a model still has the variables that its module was made with."""
    found = [*trainable_variables(model)]
    own = module.variables.values()
    return (
        module.model is model
        and len(found) == len(own)
        and all(one is other for one, other in zip(found, own, strict=True))
    )


@contextmanager
def _torch_random_stream() -> Iterator[None]:
    """Within the block Keras draws from torch's stream, in this thread."""
    with _generators.to(_no_generator), _seeds.to(_drawn_seed):
        yield


class _Unwrapping(TorchFunctionMode):
    """Within the block other torch function modes see tensors instead of Keras variables."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = {name: _unwrapped(value) for name, value in (kwargs or {}).items()}
        return func(*map(_unwrapped, args), **named)


def _unwrapped(value: Any) -> Any:
    """A variable's tensor; a tracked list of Keras's as a plain one."""
    if isinstance(value, keras.Variable):
        return value.value
    return list(map(_unwrapped, value)) if isinstance(value, list) else value


def _no_generator(seed: Any) -> None:
    """No generator: torch then draws from its own stream."""


def _drawn_seed(seed: Any) -> torch.Tensor:
    return torch.randint(1 << 31, (2,))
