"""The partition of a traced model into the stages of its Plan.

A stage is a sequence of the trace's instructions. A value of one stage that an instruction of
another uses crosses the cut: the partition lists the values that each stage receives and sends. Two
kinds of values never cross: parameters are fetched where they are used, and every rank that needs
the model's inputs reads them.

If the model draws random numbers, a stage continues the stream of the stage before it, as one
device would: the state of the stream crosses like a value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.capture.instructions import Input, Instruction, Output, references
from lockstep.capture.tracing import Trace
from lockstep.plan.spec import Plan


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """One stage's part of a trace.

    Attributes:
        instructions: their numbers, in order.
        sent: values that later stages use, and those stages.
        received: values of earlier stages, and the stage of each.
        uses_inputs: it reads the model's inputs.
        stream_from: the stage that sends it the random stream; None if it draws nothing, or starts
            the stream.
        stream_to: the stage that it sends the stream to, or None.
        draws: it draws random numbers, or a later part of the step may.
        parameters: names of the parameters it uses.
        buffers: names of its buffers.
        sent_after: values to send after an instruction, their last use in the stage.
        dropped_after: values to drop after an instruction.
    """

    instructions: tuple[int, ...]
    sent: Mapping[int, tuple[int, ...]]
    received: Mapping[int, int]
    uses_inputs: bool
    stream_from: int | None
    stream_to: int | None
    draws: bool
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    sent_after: Mapping[int, tuple[int, ...]]
    dropped_after: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A traced model, cut into stages.

    Attributes:
        instructions: of the whole trace.
        parts: by stage.
        value_bytes: sizes of the values that cross, for the largest microbatch.
    """

    instructions: tuple[Instruction, ...]
    parts: tuple[StagePart, ...]
    value_bytes: Mapping[int, int]


def partition(plan: Plan, trace: Trace, value_bytes: Mapping[int, int]) -> Partition:
    """Cut a trace into the Plan's stages.

    Args:
        plan: one with a pipeline.
        trace: of the model, in training or evaluation.
        value_bytes: sizes of the values that may cross, for the largest microbatch.
    """
    assert plan.pipeline is not None
    num_stages = len(plan.pipeline.stages)
    of_layer = stages_of_layers(plan, trace)
    # The last stage has the outputs and the loss.
    stages = [
        num_stages - 1 if isinstance(instruction, Output) else of_layer[instruction.layer]
        for instruction in trace.instructions
    ]
    streams = _streams(trace, of_layer, num_stages)
    parts = tuple(_part(trace, stages, of_layer, stage, streams) for stage in range(num_stages))
    crossing = {value for part in parts for value in part.sent}
    return Partition(
        instructions=trace.instructions,
        parts=parts,
        value_bytes={value: value_bytes[value] for value in sorted(crossing)},
    )


def partitions(
    plan: Plan, traced: Iterable[tuple[Trace, Mapping[int, int]]], num_samples: int, evaluated: int
) -> dict[bool, Partition]:
    """Cut traces of training and evaluation into the Plan's stages.

    Args:
        plan: one with a pipeline.
        traced: the traces, each with the sizes of its values.
        num_samples: of which these are the sizes.
        evaluated: samples of the largest batch that is evaluated, which may be more.
    """
    more = max(-(-evaluated // (plan.num_shares * num_samples)), 1)
    return {
        trace.training: partition(
            plan,
            trace,
            sizes if trace.training else {value: more * size for value, size in sizes.items()},
        )
        for trace, sizes in traced
    }


def stages_of_layers(plan: Plan, trace: Trace) -> list[int]:
    """The stage of each layer of a trace.

    A layer that is not in the Plan (it runs only in evaluation, say) gets the stage of the layer
    before it, and no layer gets an earlier stage than the layer before it.
    """
    by_name = {layer.name: layer.stage for layer in plan.layers}
    stages: list[int] = []
    for layer in trace.layers:
        before = stages[-1] if stages else 0
        stages.append(max(before, by_name.get(layer.name, before)))
    return stages


def _part(
    trace: Trace,
    stages: Sequence[int],
    of_layer: Sequence[int],
    stage: int,
    streams: Sequence[int],
) -> StagePart:
    own = [
        number
        for number, instruction in enumerate(trace.instructions)
        if stages[number] == stage and not isinstance(instruction, Input)
    ]
    used = {value: number for number in own for value in references(trace.instructions[number])}
    inputs = {value for value in used if isinstance(trace.instructions[value], Input)}
    sent = _users_elsewhere(trace, stages, own)
    # A value may be changed in place until its last use in its stage: it is sent after that.
    last = {value: used.get(value, value) for value in sent}
    for value, changer in trace.rewritten:
        if value in last and stages[changer] == stage:
            last[value] = max(last[value], changer)
    place = streams.index(stage) if stage in streams else None
    layers = [
        layer for layer, its_stage in zip(trace.layers, of_layer, strict=True) if its_stage == stage
    ]
    return StagePart(
        instructions=tuple(own),
        sent=sent,
        received={
            value: stages[value]
            for value in sorted(used)
            if stages[value] != stage and value not in inputs
        },
        uses_inputs=bool(inputs),
        stream_from=streams[place - 1] if place else None,
        stream_to=streams[place + 1] if place is not None and place + 1 < len(streams) else None,
        draws=place is not None,
        parameters=_unique(name for layer in layers for name in layer.parameters),
        buffers=_unique(name for layer in layers for name in layer.buffers),
        sent_after=inverted({value: last[value] for value in sent}),
        dropped_after=inverted({value: last.get(value, number) for value, number in used.items()}),
    )


def _users_elsewhere(
    trace: Trace, stages: Sequence[int], own: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """By value of a stage, the other stages that use it."""
    users: dict[int, set[int]] = {number: set() for number in own}
    for number, instruction in enumerate(trace.instructions):
        for value in references(instruction):
            if value in users and stages[number] != stages[value]:
                users[value].add(stages[number])
    return {value: tuple(sorted(found)) for value, found in users.items() if found}


def _streams(trace: Trace, of_layer: Sequence[int], num_stages: int) -> list[int]:
    """The stages that draw random numbers, in order; the last one's loss may draw, too."""
    drawing = {stage for layer, stage in zip(trace.layers, of_layer, strict=True) if layer.draws}
    return sorted(drawing | {num_stages - 1}) if drawing else []


def inverted(instructions: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """From the instruction of each value to the values of each instruction."""
    values: dict[int, list[int]] = {}
    for value, number in instructions.items():
        values.setdefault(number, []).append(value)
    return {number: tuple(found) for number, found in values.items()}


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
