"""The LayerGraph: what the model is, as pure data.

Layers are keyed by their fully qualified module name. This first form lists every module that
owns parameters or buffers itself or sees the whole batch, in the order of
``model.named_modules()``; edges and measured costs are added by the makers that need them. No torch
here: a graph is read from JSON and planned for without it.
"""

import msgspec


class ParameterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a layer, under the first name it has in the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A module that owns parameters or buffers itself, or whose output depends on the batch.

    Attributes:
        name: fully qualified name; "" is the model itself.
        kind: the module's class name.
        parameters: those it owns. A tied parameter is listed by every layer that owns it, under
            its own name there; ``LayerGraph.tied`` says which names are one.
        buffers: names of its buffers.
        uses_batch_statistics: its output for one sample depends on the whole batch (BatchNorm).
    """

    name: str
    kind: str
    parameters: tuple[ParameterInfo, ...] = ()
    buffers: tuple[str, ...] = ()
    uses_batch_statistics: bool = False


class LayerGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A model's layers in order, and which of their parameters are one.

    Attributes:
        layers: every module that owns parameters or buffers, or sees the whole batch.
        tied: groups of names that are one Parameter, the first name being the one it goes by.
    """

    layers: tuple[Layer, ...]
    tied: tuple[tuple[str, ...], ...] = ()

    @property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """Every parameter once, under its first name."""
        aliases = {name for group in self.tied for name in group[1:]}
        return tuple(
            parameter
            for layer in self.layers
            for parameter in layer.parameters
            if parameter.name not in aliases
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements, tied ones counted once."""
        return sum(parameter.size for parameter in self.parameters)
