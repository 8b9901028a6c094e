"""Traces a model: its forward pass as a flat list of instructions, divided into layers.

The model is recorded on example data (``recording``). Modules that cannot be recorded are found and
called as a whole instead, if need be the whole model. Then the trace is compared with the model:
the same outputs bit by bit, and the same gradients; and with another number of samples the recorder
must see the same instructions.

Decisions of Python code are fixed as for the example. The number of samples may change, nothing
else is checked: trace anew for inputs of other shapes, types or structure, for training and
evaluation, and under the ``torch.autocast`` that the instructions will run under.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from lockstep.capture.calls import telling, uncompiled
from lockstep.capture.instruction_log import DataError, Record
from lockstep.capture.instructions import CallModule, Instruction, run_instruction
from lockstep.capture.layering import TracedLayer, divide
from lockstep.capture.layers import check_modules
from lockstep.capture.recording import Recorder, inputs_of, is_leaf
from lockstep.capture.replaying import (
    MismatchError,
    Replay,
    Result,
    compare_recordings,
    one_line,
    result_of,
)
from lockstep.capture.state import ModelState, set_mode
from lockstep.data.order import holds_streams
from lockstep.data.trees import Tree, map_tensors, tensors_of

__all__ = ["Trace", "TracedLayer", "run_trace", "trace_model", "trace_modes"]


Given = Callable[[Tree], Tree]


def _as_is(inputs: Tree) -> Tree:
    return inputs


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A model's forward pass.

    Attributes:
        instructions: in order; those of a layer are consecutive.
        layers: in order.
        training: whether the model was in training mode.
        changes: pairs (instruction that made a tensor, one of a later layer that changes it in
            place), as seen on the example.
        rewritten: pairs (value, instruction that changes it in place, also through a view).
    """

    instructions: tuple[Instruction, ...]
    layers: tuple[TracedLayer, ...]
    training: bool
    changes: tuple[tuple[int, int], ...] = ()
    rewritten: tuple[tuple[int, int], ...] = ()


@holds_streams
def trace_model(
    model: nn.Module,
    inputs: Tree,
    *,
    training: bool,
    atomic: Mapping[str, str] | None = None,
    given: Given = _as_is,
) -> Trace:
    """Trace a model; it and the random streams do not change.

    Args:
        model: the model; may be on the meta device.
        inputs: an example batch of a few samples, along the first dim: a tuple of positional
            arguments, a dict of keyword arguments, or the one argument. It gets no gradients and
            does not change.
        training: trace the model in training mode, with gradients; else in evaluation without.
        atomic: paths of modules not to trace through, and why; see ``trace_modes``.
        given: turns inputs into the model's arguments.

    Raises:
        ModelError: see ``check_modules``.
        Exception: any that the model raises when called with ``inputs``.
    """
    check_modules(model)
    return _Tracer(model, inputs, given, training=training).trace(dict(atomic or {}))


def trace_modes(model: nn.Module, inputs: Tree, given: Given = _as_is) -> tuple[Trace, Trace]:
    """Traces for training and evaluation with the same atomic modules."""
    known: dict[str, str] = {}
    while True:
        training = trace_model(model, inputs, training=True, atomic=known, given=given)
        known |= _atomic_of(training)
        try:
            evaluation = trace_model(model, inputs, training=False, atomic=known, given=given)
        except Exception as error:
            error.add_note("This was a pass in evaluation mode, under torch.no_grad().")
            raise
        if _atomic_of(evaluation).keys() <= known.keys():
            return training, evaluation
        known |= _atomic_of(evaluation)


def _atomic_of(trace: Trace) -> dict[str, str]:
    calls = [one for one in trace.instructions if isinstance(one, CallModule)]
    layers = [(call.target, trace.layers[call.layer]) for call in calls]
    return {path: layer.reason for path, layer in layers if layer.is_atomic}


def run_trace(
    trace: Trace, model: nn.Module, inputs: Tree, observe: Callable[[int, Any], None] | None = None
) -> Any:
    """The model's outputs, by its instructions.

    Args:
        trace: of the model.
        model: the model, in the mode it was traced in.
        inputs: its inputs.
        observe: called with each instruction's number and value.
    """
    values: list[Any] = []
    for number, instruction in enumerate(trace.instructions):
        values.append(run_instruction(instruction, model, values.__getitem__, inputs))
        if observe is not None:
            observe(number, values[-1])
    return values[-1]


class _Tracer:
    """Traces one model in one mode."""

    def __init__(
        self, model: nn.Module, inputs: Tree, given: Given = _as_is, *, training: bool
    ) -> None:
        self._model = model
        self._training = training
        self._inputs = given(inputs)
        more = _more_samples(inputs)
        self._more = None if more is None else given(more)
        self._state = ModelState(model)
        self._is_told = False

    def trace(self, atomic: dict[str, str]) -> Trace:
        """Record until the trace does what the model does."""
        atomic = {**_hooked(self._model), **atomic}
        wanted = self._result(self._call)
        while True:
            try:
                return self._attempt(atomic, wanted)
            except MismatchError as mismatch:
                if mismatch.looks_at_values and self._may_tell(wanted):
                    self._is_told = True
                    continue
                if "" in atomic:  # the call of the whole model failed
                    raise mismatch.__cause__ or mismatch from None
                path, reason = mismatch.path, mismatch.reason
                assert path not in atomic, reason  # an atomic module runs no instructions
                atomic[path] = reason

    def _may_tell(self, wanted: Result) -> bool:
        """Whether the model does the same under ``is_compiling()``, and was not tried so before."""
        if self._is_told:
            return False
        with telling(True):
            try:
                return not self._result(self._call).unlike(wanted, rounded=True)
            except Exception:  # any: then ``is_compiling()`` stays False
                return False

    def _attempt(self, atomic: Mapping[str, str], wanted: Result) -> Trace:
        records = self._record(atomic, self._inputs)
        self._compare_with_more(atomic, records)
        layered = divide(self._model, records, atomic)
        trace = Trace(
            instructions=layered.instructions, layers=layered.layers, training=self._training
        )
        if "" in atomic:  # one call: there is nothing to verify
            return trace
        replay = Replay(
            self._model, layered.instructions, [records[one] for one in layered.records]
        )
        self._verify(replay, wanted)
        return replace(
            trace,
            changes=tuple(sorted(replay.changes)),
            rewritten=tuple(sorted(replay.rewritten)),
        )

    def _compare_with_more(self, atomic: Mapping[str, str], records: list[Record]) -> None:
        """Compare a recording with one of more samples."""
        if self._more is None:
            return
        try:
            others = self._record(atomic, self._more)
        except MismatchError:
            try:
                self._run(self._call, self._more)
            except Exception:  # some models allow only one number of samples
                self._more = None
                return
            raise
        compare_recordings(records, others)

    def _record(self, atomic: Mapping[str, str], inputs: Tree) -> list[Record]:
        recorder = Recorder(self._model, atomic, grad_enabled=self._training, is_told=self._is_told)

        def record(copied: Tree) -> tuple[list[Record], list[str]]:
            return recorder.record(copied), self._state.changed_modules()

        try:
            records, changed = self._run(record, inputs)
        except Exception as error:
            raise MismatchError(
                recorder.culprit,
                one_line(recorder.failure or error),
                inside=recorder.inside,
                looks_at_values=isinstance(recorder.failure, DataError),
            ) from error
        for path in changed:
            is_whole = is_leaf(self._model.get_submodule(path))
            if not is_whole and not any(_is_within(path, one) for one in atomic):
                raise MismatchError(path, "changes its attributes in forward")
        return list(records)

    def _verify(self, replay: Replay, wanted: Result) -> None:
        difference = self._result(replay).unlike(wanted, rounded=self._is_told)
        if not difference:
            return
        if self._result(self._call).unlike(wanted):  # the model is not deterministic
            return
        path, inside = replay.first_difference()
        raise MismatchError(path, f"traced, its {difference} differ", inside=inside)

    def _result(self, forward: Callable[[Tree], Any]) -> Result:
        """The result of ``forward`` on the example."""

        def run(copied: Tree) -> Result:
            return result_of(self._model, forward(copied), with_gradients=self._training)

        return cast(Result, self._run(run, self._inputs))

    def _run(self, body: Callable[[Tree], Any], inputs: Tree) -> Any:
        """Run ``body`` on a copy of inputs, from the same state every time."""
        copied = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
        tensors = [*tensors_of(inputs), *self._model.parameters()]
        is_meta = any(tensor.is_meta for tensor in tensors)
        place = torch.device("meta") if is_meta else nullcontext()
        torch.clear_autocast_cache()  # of the casts of the run before
        try:
            set_mode(self._model, training=self._training)
            # Compiled code is traced, and run in stages, uncompiled.
            with torch.set_grad_enabled(self._training), place, uncompiled():
                return body(copied)
        finally:
            self._state.restore()

    def _call(self, inputs: Tree) -> Any:
        arguments = inputs_of(inputs)
        return self._model(
            *(value for target, value in arguments if not isinstance(target, str)),
            **{target: value for target, value in arguments if isinstance(target, str)},
        )


def _hooked(model: nn.Module) -> dict[str, str]:
    """Modules whose hooks would not run if they were traced through."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return {
        name: "has hooks"
        for name, module in model.named_modules()
        if not is_leaf(module) and any(getattr(module, kind) for kind in kinds)
    }


def _more_samples(inputs: Tree) -> Tree | None:
    """The inputs with more than twice the samples, if it is clear what a sample is."""
    sizes = {len(tensor) for tensor in tensors_of(inputs) if tensor.dim() > 0}
    return None if len(sizes) != 1 or 0 in sizes else map_tensors(_with_more, inputs)


def _with_more(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor, tensor[:1]]) if tensor.dim() > 0 else tensor


def _is_within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
