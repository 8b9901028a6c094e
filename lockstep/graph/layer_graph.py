"""The LayerGraph: the model's layers, parameters and flows, as pure data.

Layers are keyed by their fully qualified module name. There are two degrees of detail, and makers
say which one they need. ``capture.layers`` lists every module that owns parameters or buffers
itself or sees the whole batch, in the order of ``model.named_modules()``. ``capture.graph`` lists
the layers in the order in which the model runs them, with the tensors that flow between them and
the costs of each. No torch here: a graph is read from JSON and planned for without it.
"""

import math

import msgspec

from lockstep.disk import JsonFile
from lockstep.errors import PlanError


class ParameterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a layer, under the first name it has in the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        bits = int("".join(filter(str.isdigit, self.dtype.partition("_")[0])) or 8)
        return self.size * max(bits // 8, 1)


class LayerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a layer for one microbatch.

    Attributes:
        forward_seconds: of its forward pass.
        backward_seconds: of its backward pass, for inputs and parameters.
        activation_bytes: kept from forward to backward.
        is_estimated: counted from floating point operations instead of measured.
        forward_fixed_seconds: the part of the forward pass that no number of samples changes.
        backward_fixed_seconds: likewise of the backward pass.
        operations: floating point operations of the forward pass; 0 if they were not counted.
        gradient_bytes: of gradients of its outputs and inputs, which its backward pass has at once.
    """

    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    is_estimated: bool = False
    forward_fixed_seconds: float = 0.0
    backward_fixed_seconds: float = 0.0
    operations: float = 0.0
    gradient_bytes: int = 0


class OptimizerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimizer keeps and does.

    Attributes:
        slots: tensors of a parameter's size that it keeps for each; Adam has two.
        seconds_per_element: of an update, on the device where layers were measured.
    """

    slots: float = 2.0
    seconds_per_element: float = 2e-9


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of tensor parallelism can divide a parameter; see ``plan.splits``.

    Attributes:
        name: of the parameter.
        dim: that is cut.
        sizes: of the blocks that it consists of.
        unit: elements that stay together.
        by: ``"columns"``, the outputs of its layer; ``"rows"``, its inputs; or ``"matrices"``.
        gathered_for: the operation that gets the layer's outputs whole; "" if none does.
    """

    name: str
    dim: int
    sizes: tuple[int, ...]
    unit: int
    by: str
    gathered_for: str = ""


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, or a few, that one layer makes and later ones use.

    Attributes:
        source: index of the layer that makes it.
        num_bytes: size, for one microbatch.
        users: indices of the layers that use it, in order.
    """

    source: int
    num_bytes: int
    users: tuple[int, ...]


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A module that owns parameters or buffers itself, or whose output depends on the batch.

    Attributes:
        name: fully qualified name; "" is the model itself.
        kind: the module's class name.
        parameters: those it owns. A tied parameter is listed by every layer that owns it, under
            its own name there; ``LayerGraph.tied`` says which names are one.
        buffers: names of its buffers.
        uses_batch_statistics: its output for one sample depends on the whole batch (BatchNorm).
        device: the device that the user's scopes give it, if there are any.
        draws: it draws random numbers.
        atomic_reason: why it runs as one piece although it is made of others; "" if it is not.
        costs: of running it, if they were measured.
    """

    name: str
    kind: str
    parameters: tuple[ParameterInfo, ...] = ()
    buffers: tuple[str, ...] = ()
    uses_batch_statistics: bool = False
    device: int | None = None
    draws: bool = False
    atomic_reason: str = ""
    costs: LayerCosts | None = None


class LayerGraph(msgspec.Struct, JsonFile, frozen=True, kw_only=True):
    """A model's layers in order, and the parameters that they share.

    Attributes:
        layers: every module that owns parameters or buffers, or sees the whole batch; or, if
            there are flows, all layers that run, in the order in which they run.
        tied: groups of names of one Parameter; the first name is the one in use.
        flows: tensors of earlier layers that later ones use.
        channels_last: images run through it with their channels together in memory.
        inseparable: pairs (first, last) of layers, such that ``last`` changes in place what
            ``first`` has made, or a buffer that both use is changed: no cut may come between.
        samples: of the microbatch that costs and flows are for; 0 if they were not measured.
        optimizer: the costs of the optimizer that trains it.
        divisions: of parameters by tensor parallelism, if the model was observed.
        threads_speed: of a rank alone on its host with a thread for each core, relative to the
            single thread for which costs are.
        speed_together: of a thread while all cores of its host work, relative to one that works
            alone, for which costs are.
    """

    layers: tuple[Layer, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    flows: tuple[Flow, ...] = ()
    inseparable: tuple[tuple[int, int], ...] = ()
    channels_last: bool = False
    samples: int = 0
    optimizer: OptimizerCosts = OptimizerCosts()
    divisions: tuple[Division, ...] = ()
    threads_speed: float = 1.0
    speed_together: float = 1.0

    @property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """Every parameter once, under its first name."""
        aliases = {name for group in self.tied for name in group[1:]}
        found = {
            parameter.name: parameter
            for layer in self.layers
            for parameter in layer.parameters
            if parameter.name not in aliases
        }
        return tuple(found.values())

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements, tied ones counted once."""
        return sum(parameter.size for parameter in self.parameters)

    @classmethod
    def from_json(cls, text: bytes | str) -> "LayerGraph":
        """Read a graph that ``to_json`` wrote.

        Raises:
            PlanError: the text is no graph.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise PlanError(
                "This is no graph of layers.",
                received=error,
                fix="Give a file that LayerGraph.save wrote.",
            ) from error
