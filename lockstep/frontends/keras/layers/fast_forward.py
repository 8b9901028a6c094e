"""Graphs of Keras's own layers, run without Keras's work around each layer.

``Layer.__call__`` checks and converts arguments, looks for masks, opens scopes and finds out
whether this is training. For a small layer that takes several times as long as the layer itself. In
a functional model of Keras's own layers, all of one dtype and without masks, it has no effect. So
each layer's ``call`` is called directly.

Keras calls everything else itself: other models, models with any other layer, and inputs of another
shape or dtype than the model was made for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import torch
from keras.src.backend.common.masking import get_keras_mask
from keras.src.backend.torch.core import to_torch_dtype
from keras.src.layers.layer import Layer
from keras.src.models.functional import Functional, unpack_singleton
from keras.src.ops.operation import Operation

from lockstep.data.trees import Tree

# Modules of layers that do only what ``call`` does, and what ``_is_plain`` checks.
_KNOWN = tuple(
    f"keras.src.layers.{place}"
    for place in (
        "activations.",
        "convolutional.",
        "core.dense",
        "core.einsum_dense",
        "core.embedding",
        "merging.",
        "normalization.batch_normalization",
        "normalization.group_normalization",
        "normalization.layer_normalization",
        "normalization.rms_normalization",
        "normalization.unit_normalization",
        "pooling.",
        "regularization.",
        "reshaping.",
    )
)

_Values = dict[int, Any]  # by the ids of the KerasTensors that they are values of


@dataclass(frozen=True)
class _Step:
    """A layer's place in the graph.

    Attributes:
        operation: the layer, or another operation.
        call: the function that computes it.
        takes_training: True if it has an argument ``training``.
        single: the id of its only argument; None if it has others.
        arguments: Keras's.
        outputs: ids.
    """

    operation: Any
    call: Callable[..., Any]
    takes_training: bool
    single: int | None
    arguments: Any
    outputs: tuple[int, ...]

    def run(self, values: _Values, *, training: bool) -> None:
        """Compute the values of the outputs."""
        named = {"training": training} if self.takes_training else {}
        if self.single is not None:
            made = self.call(values[self.single], **named)
        else:
            args, kwargs = self.arguments.fill_in(values)
            kwargs.pop("mask", None)  # there is none
            made = self.call(*args, **{**kwargs, **named})
        if len(self.outputs) == 1 and isinstance(made, torch.Tensor):
            values[self.outputs[0]] = made
        else:
            values.update(zip(self.outputs, keras.tree.flatten(made), strict=True))


class DirectCalls:
    """A graph whose layers are called directly.

    Args:
        graph: the functional model.
        steps: its layers, each after the layers that it depends on.
    """

    def __init__(self, graph: Functional, steps: list[_Step]) -> None:
        self._graph = graph
        self._steps = steps
        self._inputs = [(id(one), one.shape, to_torch_dtype(one.dtype)) for one in graph._inputs]
        self._outputs = [id(one) for one in graph._outputs]
        given = graph._inputs_struct
        self._takes_list = isinstance(given, list | tuple)
        self._takes_tensor = isinstance(given, keras.KerasTensor) or (
            isinstance(given, list) and len(given) == 1
        )
        self._is_single = isinstance(graph._outputs_struct, keras.KerasTensor)

    @classmethod
    def of(cls, model: Any) -> "DirectCalls | None":
        """The direct calls of a model; None if a part of it is not known."""
        graph = _graph_of(model)
        if graph is None or not _is_plain(model, model.compute_dtype):
            return None
        steps = [
            _step(node, model.compute_dtype)
            for _, nodes in sorted(graph._nodes_by_depth.items(), reverse=True)
            for node in nodes
            if node.operation and not node.is_input
        ]
        known = [step for step in steps if step is not None]
        return cls(graph, known) if len(known) == len(steps) else None

    def takes(self, inputs: Tree) -> bool:
        """Whether the inputs have the shapes and dtypes that the model was made for."""
        is_listed = isinstance(inputs, list | tuple)
        if not (self._takes_list if is_listed else self._takes_tensor):
            return False  # Keras converts them, or raises an error
        given = inputs if is_listed else [inputs]
        return len(given) == len(self._inputs) and all(
            type(one) is torch.Tensor
            and one.dtype == dtype
            and one.dim() == len(shape)
            and all(size in (None, own) for own, size in zip(one.shape, shape, strict=True))
            and get_keras_mask(one) is None
            for one, (_, shape, dtype) in zip(given, self._inputs, strict=True)
        )

    def run(self, inputs: Tree, *, training: bool) -> Tree:
        """The model's outputs."""
        given = inputs if isinstance(inputs, list | tuple) else [inputs]
        values = {place: one for one, (place, _, _) in zip(given, self._inputs, strict=True)}
        for step in self._steps:
            try:
                step.run(values, training=training)
            except Exception as error:
                error.add_note(f"This was in {step.operation.name!r} of {self._graph.name!r}.")
                raise
        outputs = [values[place] for place in self._outputs]
        if self._is_single:
            return outputs[0]
        packed: Tree = keras.tree.pack_sequence_as(self._graph._outputs_struct, outputs)
        return unpack_singleton(packed)


def _graph_of(model: Any) -> Functional | None:
    """The graph of a model that is only a graph; None for others."""
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        graph: Functional | None = model._functional
        return graph
    is_graph = isinstance(model, Functional) and type(model).call is Functional.call
    return model if is_graph else None


def _step(node: Any, dtype: str) -> _Step | None:
    """A node of a graph; None if its operation, or an argument, is not known."""
    operation, arguments = node.operation, node.arguments
    call = _call_of(operation, dtype)
    is_embedding = type(operation).__name__ == "Embedding"  # which takes integers
    if call is None or arguments.kwargs.get("mask") is not None:
        return None
    if not is_embedding and any(one.dtype != dtype for one in arguments.keras_tensors):
        return None
    is_single = len(arguments.args) == 1 and not arguments.kwargs.keys() - {"mask"}
    single = arguments.args[0] if is_single else None
    return _Step(
        operation=operation,
        call=call,
        takes_training=getattr(operation, "_call_has_training_arg", False),
        single=id(single) if isinstance(single, keras.KerasTensor) else None,
        arguments=arguments,
        outputs=tuple(id(one) for one in node.outputs),
    )


def _call_of(operation: Any, dtype: str) -> Callable[..., Any] | None:
    if isinstance(operation, Functional | keras.Sequential):
        inner = DirectCalls.of(operation)
        if inner is None or len(inner._inputs) != 1:
            return None
        return inner.run
    kind = type(operation)
    if isinstance(operation, Layer):
        # A layer within, such as an activation, may add losses or need ``training``.
        is_plain = is_plain_kind(operation) and _is_plain(operation, dtype)
        if not is_plain or operation._flatten_layers(include_self=False):
            return None
        return partial(_dense, operation) if kind is keras.layers.Dense else operation.call
    is_known = isinstance(operation, Operation) and kind.__module__.startswith("keras.src.ops.")
    return operation.call if is_known and not operation._remat_mode else None


def is_plain_kind(layer: Any) -> bool:
    """Whether a layer is one of Keras's own without special work around its call."""
    return type(layer).__module__.startswith(_KNOWN)


def _dense(layer: Any, inputs: torch.Tensor, training: bool = False) -> torch.Tensor:
    """``Dense.call`` without its look-up of the dtype, half of a small layer's time."""
    outputs = torch.matmul(inputs, layer._kernel.value)
    if layer.bias is not None:
        outputs = outputs + layer.bias.value
    if layer.activation is not None:
        outputs = layer.activation(outputs)
    return outputs


def _is_plain(layer: Any, dtype: str) -> bool:
    """Whether calling the layer does only ``call``, for plain tensors of one dtype."""
    own = vars(layer)
    return bool(
        layer.built
        and layer.activity_regularizer is None
        and layer.compute_dtype == layer.variable_dtype == dtype
        and layer.quantization_mode is None
        and not layer._remat_mode
        and not getattr(layer, "mask_zero", False)
        and not getattr(layer, "lora_enabled", False)
        and "call" not in own
        and not own["_forward_hooks"]
        and not own["_forward_pre_hooks"]
        and not own["_backward_hooks"]
        and not own["_backward_pre_hooks"]
    )
