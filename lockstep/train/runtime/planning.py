"""Makes Plans that cut the model into stages, and the model's stages for such a Plan.

Most Plans need only the names of the layers. A Plan with stages needs the tensors between layers
and the cost of each layer. So the model is traced on a sample of the data, and each layer is run
and timed, before a process starts. Measurements are kept: while the model is the same, all calls of
a Trainer cut it in the same places, and no parameter moves between them. Traces are kept, too,
while model and inputs are the same but for the values of tensors.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn

from lockstep.capture.graph import PART, capture_graph, find_inseparable, profile_graph, value_bytes
from lockstep.capture.layers import capture_layers, functions_of
from lockstep.capture.tracing import Trace, trace_modes
from lockstep.cluster.devices import discover
from lockstep.cluster.topology import Cluster
from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.map_style.sources import Source
from lockstep.data.order import holds_streams, kept_streams
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.errors import OptionError
from lockstep.graph.layer_graph import Division, LayerGraph
from lockstep.parallel.data_parallel.batch_norm import note_lone_sample
from lockstep.parallel.data_parallel.forward import (
    DTYPES,
    call_model,
    channels_last,
    computing_in,
    narrowed,
    running_lstms,
)
from lockstep.parallel.pipeline.partition import Partition, partitions
from lockstep.parallel.settings import num_threads
from lockstep.parallel.storage.allocator import keep_freed_memory
from lockstep.parallel.storage.cpu_quirks import breaks_channels_last
from lockstep.parallel.tensor.observing import has_hooks, observed_splits
from lockstep.parallel.transfer.serialization import describe
from lockstep.plan.makers.data_parallel import Maker, PlanTrials
from lockstep.plan.makers.tensor import TENSOR_SAMPLES
from lockstep.plan.search.automatic import ranking_of
from lockstep.plan.search.ranking import described
from lockstep.plan.spec import Plan
from lockstep.plan.splits import DivisionOptions, TensorSplits
from lockstep.train.batch_size_search.batch_size_cache import key_of
from lockstep.train.fit.failing_layer import naming_layer
from lockstep.train.runtime.model_profile import (
    cached_graph,
    profile_optimizer,
    this_machine,
    timed_graph,
)

Partitions = Mapping[bool, Partition]

# A trace, and the bytes of the values of its instructions, for training and for evaluation.
_Traced = tuple[tuple[Trace, Mapping[int, int]], ...]

_T = TypeVar("_T")

_MOST_KEPT = 4
_TRACED_SAMPLES = 2


def _as_made(plan: Plan) -> Plan:
    return plan


def _no_optimizer() -> None:
    return None


def announce_nothing(doing: str) -> None:
    """For work that is shown nowhere."""


class Planning:
    """Makes Plans for one model.

    Args:
        model: the model, or one of its shape on the meta device.
        dims: the dims of the samples in its inputs.
        optimizer: returns what trains it, if anything does.
    """

    def __init__(
        self,
        model: nn.Module,
        dims: BatchDims = SAMPLES_FIRST,
        optimizer: Callable[[], Any] = _no_optimizer,
    ) -> None:
        self._model = model
        self._dims = dims
        self._optimizer = optimizer
        self._chosen: tuple[tuple[Maker, bool], Maker] | None = None
        self._measured: LayerGraph | None = None
        self._traces: dict[bytes, tuple[Trace, Trace]] = {}
        self._sizes: dict[bytes, _Traced] = {}
        self._split: dict[bytes, TensorSplits] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Another process traces and measures anew."""
        return vars(Planning(self._model, self._dims, self._optimizer))

    def plan(
        self,
        maker: Maker,
        precision: str,
        source: Source | None,
        batch_size: int,
        cluster: Cluster | None = None,
        settle: Callable[[Plan], Plan] = _as_made,
        announce: Callable[[str], None] = announce_nothing,
        check: Callable[[Plan], Plan] = _as_made,
        *,
        trials: PlanTrials | None = None,
        for_training: bool = False,
        evaluated: int = 0,
    ) -> tuple[Plan, Partitions]:
        """A Plan, and the model's stages in training and in evaluation.

        Args:
            maker: of the Plan.
            precision: of the Plan.
            source: the data of the model; None if another host reads it.
            batch_size: of the global batch.
            cluster: the hosts and devices; None is this host.
            settle: makes the Plan the same on all hosts, whose measurements differ.
            announce: called with the name of a step that may take long.
            check: refuses Plans, if one is to be chosen; returns the Plan that is trained by.
            trials: of Plans, likewise.
            for_training: the call trains; a choice for other calls is then checked again.
            evaluated: samples of a batch that is evaluated, if these may be more.

        Raises:
            OptionError: a sample is needed and there is none.
        """
        cluster = cluster or discover()
        wanted = maker, for_training
        maker = self._choose(
            wanted, precision, source, batch_size, cluster, announce, check, trials
        )
        maker = self._with_splits(maker, precision, source, cluster)
        size = maker.sample_size(cluster, batch_size)
        if size is None:
            return settle(maker(capture_layers(self._model), cluster, batch_size)), {}
        with self._inputs(source, size, precision) as inputs:
            traced, graph = self._capture(inputs, precision, announce)
            num_samples = len(next(tensors_of(inputs)))
        plan = settle(maker(graph, cluster, batch_size))
        return plan, partitions(plan, traced, num_samples, evaluated)

    def _choose(
        self,
        wanted: tuple[Maker, bool],
        precision: str,
        source: Source | None,
        batch_size: int,
        cluster: Cluster,
        announce: Callable[[str], None],
        check: Callable[[Plan], Plan],
        trials: PlanTrials | None,
    ) -> Maker:
        """What a maker has chosen, at first and from then on; anew for a first training."""
        maker = wanted[0]
        if self._chosen is None or self._chosen[0] not in (wanted, (maker, True)):
            measured: list[LayerGraph] = []

            def measure(size: int) -> tuple[LayerGraph, Cluster]:
                measured.append(self._known_graph(source, size, precision, announce))
                announce("Measuring this machine")
                return measured[-1], this_machine(cluster, precision, measured[-1])

            def attempt(one: Maker) -> Plan:
                one = self._with_splits(one, precision, source, cluster)
                is_cut = one.sample_size(cluster, batch_size) is not None
                graph = measured[-1] if is_cut else capture_layers(self._model)
                return check(one(graph, cluster, batch_size))

            self._chosen = wanted, maker.choose(measure, cluster, batch_size, attempt, trials)
        return self._chosen[1]

    def _with_splits(
        self, maker: Maker, precision: str, source: Source | None, cluster: Cluster
    ) -> Maker:
        """The maker; one that divides layers, with how they are used."""
        num_shards = maker.num_tensor_shards(cluster)
        if num_shards is None:
            return maker
        with self._inputs(source, TENSOR_SAMPLES, precision, repeats=True) as inputs:
            splits = self._splits(inputs, precision, num_shards, maker.division)
        return maker.with_splits(splits)

    def ranking(self) -> list[dict[str, Any]]:
        """The plans among which one was chosen, with their predicted costs; none without choice."""
        return [] if self._chosen is None else [*map(described, ranking_of(self._chosen[1]))]

    def _known_graph(
        self,
        source: Source | None,
        size: int,
        precision: str,
        announce: Callable[[str], None],
    ) -> LayerGraph:
        """The graph of ``graph``, with the optimizer's costs; measured once on a machine."""
        optimizer = self._optimizer()

        def measure() -> LayerGraph:
            graph = self.graph(source, size, precision, announce)
            with num_threads(1):
                costs = profile_optimizer(optimizer)
            return msgspec.structs.replace(graph, optimizer=costs)

        if source is None:
            return measure()
        key = key_of(
            model=self._model,
            loss=None,
            optimizer=optimizer,
            source=source,
            precision=precision,
            maker=None,
            options=("costs", "together", size),
        )
        return cached_graph(key, measure)

    def graph(
        self,
        source: Source | None,
        size: int,
        precision: str,
        announce: Callable[[str], None] = announce_nothing,
    ) -> LayerGraph:
        """The model's graph, with costs for any number of samples, measured on ``size`` of them.

        Raises:
            OptionError: another host reads the data.
        """
        with self._inputs(source, size, precision) as inputs:
            _, graph = self._capture(inputs, precision, announce, self._profiled)
        return msgspec.structs.replace(graph, divisions=self._divisions(source, precision))

    def _divisions(self, source: Source | None, precision: str) -> tuple[Division, ...]:
        """How two ranks could divide the model's layers; none if it cannot be run so."""
        try:
            with self._inputs(source, TENSOR_SAMPLES, precision, repeats=True) as inputs:
                splits = self._splits(inputs, precision, 2, DivisionOptions())
        except Exception:  # a model may raise any; whole layers have run
            return ()
        return tuple(one.division for one in splits.parameters)

    def _profiled(
        self, traced: _Traced, inputs: Tree, announce: Callable[[str], None]
    ) -> LayerGraph:
        trace, sizes = traced[0]
        many = len(next(tensors_of(inputs)))
        few = many // PART
        fewer = map_tensors(lambda tensor: tensor[:few], inputs)
        announce(f"Measuring {len(trace.layers)} layers")
        given = self._dims.given_inputs(inputs)
        keep_freed_memory()  # as ranks do: without it, each layer's memory is mapped anew
        with num_threads(1):  # as ranks on cores will have
            graph = profile_graph(
                self._model,
                trace,
                given,
                self._dims.given_inputs(fewer) if few else None,
                sizes,
                (many, few),
            )
        is_meta = _place_of(self._model).type == "meta"
        return graph if is_meta else timed_graph(graph, self._model, trace, given)

    @contextmanager
    def _inputs(
        self, source: Source | None, size: int, precision: str, *, repeats: bool = False
    ) -> Iterator[Tree]:
        """The model's inputs, to run it on within the block as in training.

        If ``repeats``, there are as many samples as asked for, however few the data has.
        """
        if source is None:
            raise OptionError(
                "Cutting a model needs samples of the data on every host.",
                received="data that host 0 alone reads",
                fix="Pass arrays or a map-style Dataset, or use MultiWorkerMirroredStrategy.",
            )
        place = _place_of(self._model)
        numbers = torch.arange(size if repeats else min(size, len(source))) % max(len(source), 1)
        inputs = map_tensors(lambda tensor: tensor.to(place), _sample(source, numbers, precision))
        computing = computing_in(precision, "cpu" if place.type == "meta" else place.type)
        naming = naming_layer(self._model, inputs=inputs)
        with naming, computing, running_lstms(precision), _without_fused_attention():
            try:
                yield inputs
            except ValueError as error:
                note_lone_sample(error)
                raise

    @holds_streams
    def _splits(
        self, inputs: Tree, precision: str, num_shards: int, division: DivisionOptions
    ) -> TensorSplits:
        """How the model's uses of its parameters allow to divide them."""
        dims = None if division.dims is None else dict(division.dims(self._model))

        def observe() -> TensorSplits:
            call = partial(call_model, self._model, self._dims.given_inputs(inputs))
            return observed_splits(
                self._model,
                call,
                num_shards,
                division.whole,
                dims=dims,
                divides_time=division.by_time,
            )

        hooked = [name for name, one in self._model.named_parameters() if has_hooks(one)]
        key = inputs, precision, num_shards, division.whole, division.by_time, dims, hooked
        return self._kept(self._split, key, observe)

    @holds_streams
    def _capture(
        self,
        inputs: Tree,
        precision: str,
        announce: Callable[[str], None],
        measure: Callable[[_Traced, Tree, Callable[[str], None]], LayerGraph] | None = None,
    ) -> tuple[_Traced, LayerGraph]:
        """Traces and graph, for images with their channels last if the model takes them."""
        measure = measure or self._graph
        is_convolutional = any(isinstance(one, nn.Conv2d) for one in self._model.modules())
        # float64 is for proofs, and does as the reference does.
        if is_convolutional and precision != "fp64" and not breaks_channels_last(self._model):
            images = map_tensors(channels_last, inputs)
            try:
                traced = self._trace(images, precision, announce)
                graph = measure(traced, images, announce)
                return traced, msgspec.structs.replace(graph, channels_last=True)
            except RuntimeError as error:
                if "stride" not in str(error):
                    raise
        traced = self._trace(inputs, precision, announce)
        return traced, measure(traced, inputs, announce)

    def _trace(self, inputs: Tree, precision: str, announce: Callable[[str], None]) -> _Traced:
        """Traces for training and evaluation, each with the sizes of its values."""
        # The number of samples changes only sizes, so a few are enough for a trace.
        few = map_tensors(lambda tensor: tensor[:_TRACED_SAMPLES], inputs)

        def trace() -> tuple[Trace, Trace]:
            announce("Capturing the model")
            return trace_modes(self._model, few, self._dims.given_inputs)

        traces = self._kept(self._traces, (few, precision), trace)
        return self._kept(
            self._sizes,
            (inputs, precision),
            lambda: tuple(
                (trace, value_bytes(trace, self._model, self._dims.given_inputs(inputs)))
                for trace in traces
            ),
        )

    def _kept(self, known: dict[bytes, _T], key: Any, make: Callable[[], _T]) -> _T:
        """The cached value for model and key, ignoring values of tensors; else a new one."""
        digest = self._digest(key)
        found = known.pop(digest, None)
        if found is None:
            found = make()
        if digest:
            known[digest] = found
            for oldest in list(known)[:-_MOST_KEPT]:
                del known[oldest]
        return found

    def _digest(self, key: Any) -> bytes:
        """Equal if only values of tensors have changed; empty if that cannot be known.

        A trace holds the functions that the model calls, so they are included.
        """
        shapes = map_tensors(
            lambda one: (tuple(one.shape), one.stride(), one.dtype, one.device.type), key
        )
        try:
            described = describe((self._model, shapes), list(self._model.parameters()))
            described += str(functions_of(self._model)).encode()
        except Exception:  # pickling may raise anything; sending raises it again
            return b""
        return hashlib.blake2b(described).digest()

    def _graph(self, traced: _Traced, inputs: Tree, announce: Callable[[str], None]) -> LayerGraph:
        """The layer graph; with the costs measured before if the layers are the same."""
        trace, sizes = traced[0]
        names = [layer.name for layer in trace.layers]
        known = self._measured
        if known is None or [layer.name for layer in known.layers] != names:
            announce(f"Measuring {len(names)} layers")
            with num_threads(1):  # as ranks on cores will have
                self._measured = capture_graph(
                    self._model, trace, self._dims.given_inputs(inputs), sizes
                )
            return self._measured
        inseparable = find_inseparable(self._model, trace, self._dims.given_inputs(inputs))
        return msgspec.structs.replace(known, inseparable=inseparable)


def _place_of(model: nn.Module) -> torch.device:
    """The device of a model: an earlier call may have left it on one; meta if it has no memory."""
    found = [one.device for one in (*model.parameters(), *model.buffers())]
    has_no_memory = any(one.type == "meta" for one in found)
    return torch.device("meta") if has_no_memory else next(iter(found), torch.device("cpu"))


@contextmanager
def _without_fused_attention() -> Iterator[None]:
    """Turn off torch's fused layers, which fail under autocast when their operations are traced."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _sample(source: Source, numbers: torch.Tensor, precision: str) -> Tree:
    with kept_streams():
        batch = source.read(numbers, DTYPES[precision])
    return narrowed(batch.inputs, precision)
