"""Measures a traced model: times of each layer and of the whole, and bytes kept for backward.

Layers run one by one, forward and at once backward, each detached from those before. On the
meta device nothing can be timed: there, floating point operations are counted.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lockstep import accelerators
from lockstep.capture.instructions import references, run_instruction
from lockstep.capture.recording import storage_of
from lockstep.capture.seeding import (
    gradients_from,
    gradients_of,
    has_reentrant_checkpoint,
    seeded,
)
from lockstep.capture.state import ModelState, set_mode
from lockstep.capture.tracing import Trace
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.graph.layer_graph import LayerCosts

# Floating point operations per second where nothing can be timed: one CPU core, large matrices.
_ASSUMED_SPEED = 5e10

# Runs are not repeated once the counted ones have taken so long: long times vary little.
_ENOUGH_SECONDS = 2.0

# Others are repeated so often, and until the median is above the lower quartile by at most this.
_LEAST_RUNS, _MOST_RUNS, _SPREAD = 3, 40, 0.05

# In torch's error where torch.func.grad and its kin meet hooks on saved tensors.
FORBIDDEN_HOOKS = "yet support saved tensor hooks"

# Measures a call.
_Count = Callable[[Callable[[], Any]], float]


def measure_layers(
    model: nn.Module, trace: Trace, inputs: Tree, *, repeats: int | None = 3
) -> list[LayerCosts]:
    """Run every layer forward and backward; the model and random streams are left as found.

    Args:
        model: the model; on the meta device times are estimated.
        trace: of the model; without backward passes if it is for evaluation.
        inputs: a microbatch.
        repeats: runs after the first, which does not count; lower quartiles of these are returned,
            since other programs only slow runs down. None is until their times vary little. If
            they take long, one is enough.

    Returns:
        The costs of each layer. Bytes that two layers keep from forward to backward count for the
        first; those of parameters and buffers for none.
    """
    is_meta = any(one.is_meta for one in (*tensors_of(inputs), *model.parameters()))
    layers = _layer_runs(model, trace, map_tensors(_copied, inputs))
    count: _Count = _count_operations if is_meta else timed
    with _as_trained(model, trace):
        kept = _run(layers, _activation_counter(model))  # and everything is warm
        runs = _repeated(layers, count, 1 if is_meta else repeats)
    return [
        LayerCosts(
            forward_seconds=runs[layer][0],
            backward_seconds=runs[layer][1],
            activation_bytes=round(kept[layer][0]),
            gradient_bytes=layers[layer].gradient_bytes,
            is_estimated=is_meta,
        )
        for layer in range(len(trace.layers))
    ]


def measure_model(model: nn.Module, trace: Trace, call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a forward pass of the whole model, and of its backward pass; lower quartiles.

    They are more than those of the layers one by one: backward begins when all have gone forward,
    and caches no longer have what the first layers kept.

    Args:
        model: the model; it and random streams are left as found.
        trace: of the model.
        call: calls it.
    """
    whole = _ModelRun(
        model=model,
        trace=trace,
        inputs=(),
        members=(),
        outputs=(0,),
        parameters=[*model.parameters()],
        changes_inputs=False,
        call=call,
    )
    with _as_trained(model, trace):
        _run([whole], timed)  # everything is warm
        (found,) = _repeated([whole], timed, None)
    return found


@contextmanager
def _as_trained(model: nn.Module, trace: Trace) -> Iterator[None]:
    """Within the block the model is in the trace's mode; after it, it is as before."""
    state = ModelState(model)
    try:
        set_mode(model, training=trace.training)
        with torch.set_grad_enabled(trace.training):
            yield
    finally:
        state.restore()


def _repeated(
    layers: Sequence["_LayerRun"], count: _Count, repeats: int | None
) -> list[tuple[float, float]]:
    """Lower quartiles of what ``count`` says of each layer's forward and backward pass."""
    began, runs = time.perf_counter(), [_run(layers, count)]
    while _needs_more(runs, repeats) and time.perf_counter() - began <= _ENOUGH_SECONDS:
        runs.append(_run(layers, count))
    return [
        (_lower_quartile(forward), _lower_quartile(backward))
        for forward, backward in (zip(*own, strict=True) for own in zip(*runs, strict=True))
    ]


def _needs_more(runs: Sequence[Sequence[tuple[float, float]]], repeats: int | None) -> bool:
    if repeats is not None:
        return len(runs) < repeats
    if not _LEAST_RUNS <= len(runs) < _MOST_RUNS:
        return len(runs) < _LEAST_RUNS
    totals = [math.fsum(map(math.fsum, run)) for run in runs]
    return statistics.median(totals) > (1 + _SPREAD) * _lower_quartile(totals)


def _lower_quartile(values: Iterable[float]) -> float:
    found = sorted(values)
    return found[len(found) // 4]


def count_operations(model: nn.Module, trace: Trace, inputs: Tree) -> list[float]:
    """Floating point operations of each layer's forward pass; those of matrices are counted."""
    layers = _layer_runs(model, trace, map_tensors(_copied, inputs))
    state = ModelState(model)
    try:
        set_mode(model, training=trace.training)
        with torch.no_grad():
            counts = _run(layers, _count_operations, backward=False)
    finally:
        state.restore()
    return [_ASSUMED_SPEED * forward for forward, _ in counts]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def timed(body: Callable[[], Any]) -> float:
    """Seconds of a call, without those in which other programs had this thread's core."""
    accelerators.synchronize()
    waited, computed, begin = _waited_seconds(), time.thread_time(), time.perf_counter()
    body()
    accelerators.synchronize()
    took = time.perf_counter() - begin
    computed, waited = time.thread_time() - computed, _waited_seconds() - waited
    return max(took - waited, computed)  # it may have waited between two of these calls


def _waited_seconds() -> float:
    """How long this thread has waited for a core so far; 0 where the kernel does not count it."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class _WholeModel:
    """For a FlopCounterMode, whose tracker of modules forbids ``autograd.grad`` in forward."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        return

    def __exit__(self, *error: object) -> None:
        return


def _count_operations(body: Callable[[], Any]) -> float:
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _WholeModel()  # type: ignore[assignment]  # in its place
    with counter:
        body()
    return float(counter.get_total_flops()) / _ASSUMED_SPEED


def _activation_counter(model: nn.Module) -> _Count:
    """Counts bytes kept for backward that no earlier call has kept."""
    seen = {storage_of(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}

    def count(body: Callable[[], Any]) -> float:
        found = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            kept = tensor.detach()
            if storage_of(tensor) not in seen:
                size = kept.numel() * kept.element_size()
                found += kept.untyped_storage().nbytes() if storage_of(tensor) else size
                seen[storage_of(tensor)] = kept  # else another storage might take its place
            return kept

        try:
            with saved_tensors_hooks(keep, lambda kept: kept):
                body()
        except RuntimeError as error:
            if FORBIDDEN_HOOKS not in str(error):
                raise
            found = 0  # all results are counted instead
            with _Results(keep):
                body()
        return found

    return count


class _Results(TorchDispatchMode):
    """Calls a function with each tensor that an operation returns."""

    def __init__(self, see: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        map_tensors(self._see, results)
        return results


def _run(
    layers: Sequence["_LayerRun"], count: _Count, *, backward: bool = True
) -> list[tuple[float, float]]:
    """The results of ``count`` for each layer's forward and, on demand, backward pass."""
    values: dict[int, Any] = {}
    found = []
    for layer in layers:
        layer.begin(values)
        forward = count(layer.forward)
        behind = count(layer.backward) if backward and layer.prepare_backward() else 0.0
        values.update(layer.finish())
        found.append((forward, behind))
    return found


def _layer_runs(model: nn.Module, trace: Trace, inputs: Tree) -> list["_LayerRun"]:
    members: list[list[int]] = [[] for _ in trace.layers]
    leaving: set[int] = {len(trace.instructions) - 1}  # values that others use
    for number, instruction in enumerate(trace.instructions):
        members[instruction.layer].append(number)
        leaving |= {
            value
            for value in references(instruction)
            if trace.instructions[value].layer != instruction.layer
        }
    changers = {trace.instructions[changer].layer for _, changer in trace.changes}
    parameters = dict(model.named_parameters())
    return [
        _LayerRun(
            model=model,
            trace=trace,
            inputs=inputs,
            members=members[layer],
            outputs=[number for number in members[layer] if number in leaving],
            parameters=[parameters[name] for name in described.parameters],
            changes_inputs=layer in changers,
        )
        for layer, described in enumerate(trace.layers)
    ]


@dataclass(kw_only=True)
class _LayerRun:
    """Runs one layer, detached from the others.

    Attributes:
        model: the model.
        trace: of the model.
        inputs: the model's.
        members: numbers of its instructions.
        outputs: those of them whose values others use.
        parameters: those that it uses.
        changes_inputs: it changes other layers' values in place.
        gradient_bytes: of its outputs and inputs, after a backward pass.
    """

    model: nn.Module
    trace: Trace
    inputs: Tree
    members: Sequence[int]
    outputs: Sequence[int]
    parameters: Sequence[nn.Parameter]
    changes_inputs: bool
    gradient_bytes: int = 0
    _values: dict[int, Any] = field(default_factory=dict)
    _leaves: list[torch.Tensor] = field(default_factory=list)
    _roots: list[torch.Tensor] = field(default_factory=list)
    _directions: list[torch.Tensor] = field(default_factory=list)
    _wanted: list[torch.Tensor] = field(default_factory=list)
    _reenters: bool = False

    def begin(self, values: Mapping[int, Any]) -> None:
        """Take the values of earlier layers that it needs."""
        members = set(self.members)
        needed = {
            value
            for number in self.members
            for value in references(self.trace.instructions[number])
            if value not in members
        }
        self._leaves = []
        self._values = {value: map_tensors(self._cut_off, values[value]) for value in needed}

    def _cut_off(self, tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        self._leaves.append(leaf)
        return leaf.clone() if self.changes_inputs else leaf

    def forward(self) -> None:
        """Run its instructions."""
        for number in self.members:
            instruction = self.trace.instructions[number]
            self._values[number] = run_instruction(
                instruction, self.model, self._values.__getitem__, self.inputs
            )

    def prepare_backward(self) -> bool:
        """Whether there is anything to run backward."""
        made = {
            id(tensor): tensor
            for number in self.outputs
            for tensor in tensors_of(self._values[number])
            if tensor.grad_fn is not None
        }
        self._roots = list(made.values())
        self._directions = [torch.ones_like(root) for root in self._roots]
        leaves = [one for one in self._leaves if one.requires_grad]
        self._wanted = [*leaves, *(one for one in self.parameters if one.requires_grad)]
        passed = [*self._directions, *leaves]
        self.gradient_bytes = sum(one.numel() * one.element_size() for one in passed)
        self._reenters = has_reentrant_checkpoint(self._roots)
        return bool(self._roots and self._wanted)

    def backward(self) -> None:
        """Gradients of its parameters and inputs; they are not kept."""
        if self._reenters:
            root = seeded(self._roots, self._directions)
            gradients_of([root], self._wanted, [*self.model.parameters()])
        else:
            gradients_from(self._roots, self._directions, self._wanted)

    def finish(self) -> dict[int, Any]:
        """Release everything; returns the values that others use, without their history."""
        results = {number: map_tensors(_bare, self._values[number]) for number in self.outputs}
        self._values, self._leaves = {}, []
        self._roots, self._directions, self._wanted = [], [], []
        return results


@dataclass(kw_only=True)
class _ModelRun(_LayerRun):
    """Runs the model as it is, in place of one layer.

    Attributes:
        call: calls the model.
    """

    call: Callable[[], Any]

    def forward(self) -> None:
        self._values[0] = self.call()


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
