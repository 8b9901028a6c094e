"""A model's costs as sums over its units: what a run of units costs for any number of samples.

A unit is what no cut may divide (``plan.pipeline.cut_units``). Sums over the first units, one
subtraction away from any run of them, are floats: two ways to add up a run differ by rounding.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from lockstep.errors import PlanError
from lockstep.graph.layer_graph import Flow, Layer, LayerGraph, OptimizerCosts, ParameterInfo
from lockstep.plan.makers.data_parallel import matrix_of, row_limit
from lockstep.plan.pipeline.cut_units import costs_of, cut_problem, units_of

# Elements of a matrix whose gradient is formed where it lies (``parallel.data_parallel.passes``).
SMALLEST_FORMED = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a run of layers. Those that grow with the samples are of one sample.

    Attributes:
        forward_fixed: seconds of the forward pass without any sample.
        forward: seconds of a sample's forward pass.
        backward_fixed: as ``forward_fixed``.
        backward: as ``forward``.
        operations: floating point operations of a sample's forward pass.
        activation_bytes: kept from forward to backward for a sample.
        parameter_bytes: of all parameters.
        trainable_bytes: of those that are trained.
        trainable: their elements.
        formed_bytes: of those whose gradients are formed where they lie, large matrices; autograd
            makes all others, from which they are copied.
        factored_bytes: of those for which replicas exchange inputs and output gradients.
        factor_bytes: of these inputs and output gradients.
    """

    forward_fixed: float = 0.0
    forward: float = 0.0
    backward_fixed: float = 0.0
    backward: float = 0.0
    operations: float = 0.0
    activation_bytes: float = 0.0
    parameter_bytes: float = 0.0
    trainable_bytes: float = 0.0
    trainable: float = 0.0
    formed_bytes: float = 0.0
    factored_bytes: float = 0.0
    factor_bytes: float = 0.0


_FIELDS = tuple(Costs.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The costs of a model's units, and the tensors that flow between them.

    Attributes:
        units: runs ``[first, stop)`` of the graph's layers.
        sums: by name of ``Costs``, the sums over the first units, from none to all.
        flows: tensors between units.
        samples: that the flows' sizes are for.
        optimizer: the costs of the optimizer.
        gradient_bytes: for a sample, the most that any layer's backward pass has at once.
        threads_speed: see ``LayerGraph``.
    """

    units: tuple[tuple[int, int], ...]
    sums: dict[str, list[float]]
    flows: tuple[Flow, ...]
    samples: int
    optimizer: OptimizerCosts
    gradient_bytes: float = 0.0
    threads_speed: float = 1.0

    @property
    def num_units(self) -> int:
        """Units of the model."""
        return len(self.units)

    def of(self, start: int, stop: int) -> Costs:
        """The costs of units ``[start, stop)``."""
        return Costs(**{name: sums[stop] - sums[start] for name, sums in self.sums.items()})

    @property
    def whole(self) -> Costs:
        """The costs of the model."""
        return self.of(0, self.num_units)

    def threaded(self, num_cores: int) -> "Profile":
        """The same with the times of a rank that has all cores' threads, if there are several."""
        speed = self.threads_speed if num_cores > 1 else 1.0
        times = ("forward_fixed", "forward", "backward_fixed", "backward")
        faster = {name: [value / speed for value in self.sums[name]] for name in times}
        return replace(self, sums={**self.sums, **faster}, threads_speed=1.0)

    def sliced(self, ranks: int) -> "Profile":
        """The same for one of several ranks that have one copy of the parameters together."""
        names = ("parameter_bytes", "trainable_bytes", "trainable", "formed_bytes")
        parts = {name: [value / ranks for value in self.sums[name]] for name in names}
        return replace(self, sums={**self.sums, **parts})

    def merged(self, starts: Sequence[int]) -> "Profile":
        """The same with larger units, which begin at these ones."""
        edges = [*starts, self.num_units]
        home = [bisect_right(starts, unit) - 1 for unit in range(self.num_units)]
        flows = []
        for flow in self.flows:
            users = {home[user] for user in flow.users} - {home[flow.source]}
            if users:
                source, size = home[flow.source], flow.num_bytes
                flows.append(Flow(source=source, num_bytes=size, users=tuple(sorted(users))))
        return replace(
            self,
            units=tuple(
                (self.units[start][0], self.units[stop - 1][1]) for start, stop in pairwise(edges)
            ),
            sums={name: [sums[edge] for edge in edges] for name, sums in self.sums.items()},
            flows=tuple(flows),
        )

    def traffic(self, start: int, stop: int) -> tuple[float, float]:
        """Bytes of a sample that units ``[start, stop)`` receive and send in a forward pass."""
        received = sum(
            flow.num_bytes
            for flow in self.flows
            if flow.source < start and any(start <= user < stop for user in flow.users)
        )
        sent = sum(
            flow.num_bytes for flow in self.flows if start <= flow.source < stop <= flow.users[-1]
        )
        return received / self.samples, sent / self.samples


def profile_of(graph: LayerGraph, batch_size: int = 0) -> Profile:
    """The costs of a graph's units.

    Args:
        graph: with costs.
        batch_size: of the global batch, for what replicas exchange; 0 for gradients alone.

    Raises:
        PlanError: the graph has no costs, or not for how many samples they are.
    """
    if graph.samples < 1:
        raise PlanError(
            "Costs are for a number of samples.",
            received=f"samples={graph.samples}",
            fix="Measure the graph again, or give `samples` in its file.",
        )
    units = tuple(units_of(graph))
    tied = {name for names in graph.tied for name in names}
    rows = [
        costs_of_layers(graph.layers[first:stop], graph.samples, tied, batch_size)
        for first, stop in units
    ]
    flows = cut_problem(graph, units, 1, None).flows
    return Profile(
        units=units,
        sums={name: _sums(getattr(row, name) for row in rows) for name in _FIELDS},
        flows=flows,
        optimizer=graph.optimizer,
        gradient_bytes=max(costs_of(one).gradient_bytes for one in graph.layers) / graph.samples,
        threads_speed=graph.threads_speed,
        samples=graph.samples,
    )


def _sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def costs_of_layers(
    layers: Sequence[Layer], samples: int, tied: Set[str] = frozenset(), batch_size: int = 0
) -> Costs:
    """The costs of layers that run one after the other, measured on so many samples.

    Args:
        layers: the layers.
        samples: that they were measured on.
        tied: parameters that layers share.
        batch_size: see ``profile_of``.
    """
    measured = [costs_of(layer) for layer in layers]
    parameters = {one.name: one for layer in layers for one in layer.parameters}.values()
    trained = [one for one in parameters if one.trainable]
    found = (_factored(layer, samples, tied, batch_size) for layer in layers)
    factored = [one for one in found if one is not None]
    forward_fixed = math.fsum(one.forward_fixed_seconds for one in measured)
    backward_fixed = math.fsum(one.backward_fixed_seconds for one in measured)
    forward = math.fsum(one.forward_seconds for one in measured)
    backward = math.fsum(one.backward_seconds for one in measured)
    return Costs(
        forward_fixed=forward_fixed,
        forward=max(forward - forward_fixed, 0.0) / samples,
        backward_fixed=backward_fixed,
        backward=max(backward - backward_fixed, 0.0) / samples,
        operations=math.fsum(one.operations for one in measured) / samples,
        activation_bytes=sum(one.activation_bytes for one in measured) / samples,
        parameter_bytes=sum(one.num_bytes for one in parameters),
        trainable_bytes=sum(one.num_bytes for one in trained),
        trainable=sum(one.size for one in trained),
        formed_bytes=sum(one.num_bytes for one in trained if _is_formed(one)),
        factored_bytes=sum(weight.num_bytes for weight, _ in factored),
        factor_bytes=sum(
            rows * sum(weight.shape) * weight.num_bytes / weight.size for weight, rows in factored
        ),
    )


def _factored(
    layer: Layer, samples: int, tied: Set[str], batch_size: int
) -> tuple[ParameterInfo, float] | None:
    """A weight whose factors are less to exchange than its gradient, and its rows for a sample."""
    weight = matrix_of(layer)
    if weight is None or not batch_size or layer.costs is None or not layer.costs.operations:
        return None
    rows = layer.costs.operations / (2 * weight.size) / samples
    return (weight, rows) if rows * batch_size <= row_limit(layer, tied, batch_size) else None


def _is_formed(one: ParameterInfo) -> bool:
    return len(one.shape) == 2 and one.size >= SMALLEST_FORMED
