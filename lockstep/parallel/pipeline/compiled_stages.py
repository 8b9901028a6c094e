"""Compiled stages: runs of a stage's instructions as functions of torch.compile.

A run ends where the stage first needs a value of another stage, and where it sends one: so messages
arrive and leave as they do in a stage that is not compiled. A run is one instruction, which calls
the compiled function; instructions after it take its values by number. Parameters and other
attributes of the model are arguments of the function, and its layers are the user's own modules.

Instructions whose arguments torch.fx does not write (objects, tensors of the code's own) are
between runs, and are not compiled.

Functions are kept while the model lives: the next call with the same runs compiles nothing.
"""

import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from lockstep.capture.instructions import (
    CallFunction,
    CallMethod,
    CallModule,
    GetAttribute,
    Instruction,
    NamedFunction,
    Ref,
    get_attribute,
    parts_of,
    rebuild,
    references,
)
from lockstep.parallel.data_parallel.forward import compiled
from lockstep.parallel.pipeline.partition import Partition, StagePart, inverted

# Arguments that torch.fx writes as they are.
_PLAIN = frozenset((Ref, bool, int, float, str, type(None), type(...), torch.dtype, torch.device))

Compiler = Callable[[fx.GraphModule], Callable[..., Any]]

# Compiled functions by the model's id, and by code, modules and functions of the run; so many for
# a model.
_kept: dict[int, dict[object, Callable[..., Any]]] = {}
_MOST_KEPT = 256


def compiled_stages(
    partition: Partition,
    model: nn.Module,
    stages: Collection[int],
    *,
    training: bool,
    compiler: Compiler = compiled,
) -> Partition:
    """The partition with compiled instructions in some stages.

    Args:
        partition: of the model.
        model: the instructions call its modules.
        stages: the stages to compile.
        training: the partition is of the model in training.
        compiler: turns a graph into a function.
    """
    changed = _Compiled(partition, model, compiler, training=training)
    parts = [
        changed.part(part) if stage in stages else part
        for stage, part in enumerate(partition.parts)
    ]
    return replace(partition, instructions=tuple(changed.instructions), parts=tuple(parts))


class _Compiled:
    """The instructions of a partition, with new ones behind them.

    Attributes:
        instructions: of the partition; those of a run are replaced.
    """

    def __init__(
        self, partition: Partition, model: nn.Module, compiler: Compiler, *, training: bool
    ) -> None:
        self.instructions = list(partition.instructions)
        self._model = model
        self._compiler = compiler
        self._training = training
        if id(model) not in _kept:
            _kept[id(model)] = {}
            weakref.finalize(model, _kept.pop, id(model), None)
        self._functions = _kept[id(model)]

    def part(self, part: StagePart) -> StagePart:
        """A stage's part with compiled instructions."""
        runs = list(_runs(part, self.instructions))
        kept = self._used_outside(runs) | part.sent.keys()
        order: list[int] = []
        sent_after: dict[int, tuple[int, ...]] = {}
        for run in runs:
            is_compiled = _compiles(self.instructions[run[0]])
            order += self._called(run, sorted(kept & {*run})) if is_compiled else run
            if run[-1] in part.sent_after:
                sent_after[order[-1]] = part.sent_after[run[-1]]
        sending = {value: number for number, sent in sent_after.items() for value in sent}
        used = {
            value: number for number in order for value in references(self.instructions[number])
        }
        dropped = {value: sending.get(value, number) for value, number in used.items()}
        return replace(
            part,
            instructions=tuple(order),
            sent_after=sent_after,
            dropped_after=inverted(dropped),
        )

    def _used_outside(self, runs: Sequence[Sequence[int]]) -> set[int]:
        """Values that are used in another run than their own."""
        return {
            value
            for run in runs
            for number in run
            for value in references(self.instructions[number])
            if value not in run
        }

    def _called(self, run: Sequence[int], kept: Sequence[int]) -> list[int]:
        """Replace a run by a call of its function, and by its values that are kept."""
        function, given = self._function(run, kept)
        call, layer = len(self.instructions), self.instructions[run[0]].layer
        refs = tuple(Ref(value) for value in given)
        self.instructions.append(CallFunction(target=function, args=refs, layer=layer))
        for place, number in enumerate(kept):
            self.instructions[number] = CallFunction(
                target=operator.getitem, args=(Ref(call), place), layer=layer
            )
        return [call, *kept]

    def _function(
        self, run: Sequence[int], kept: Sequence[int]
    ) -> tuple[Callable[..., Any], list[int]]:
        """The function of a run, and the numbers of the values that it takes."""
        used = (value for number in run for value in references(self.instructions[number]))
        given = [value for value in dict.fromkeys(used) if value not in run]
        graph = fx.Graph()
        modules: dict[str, Any] = {}
        nodes = {value: graph.placeholder(f"value_{value}") for value in given}
        for number in run:
            instruction = self.instructions[number]
            changes_grad = instruction.no_grad and self._training
            if changes_grad:
                graph.call_function(torch.set_grad_enabled, (False,))
            nodes[number] = self._node(graph, modules, instruction, nodes)
            if changes_grad:
                graph.call_function(torch.set_grad_enabled, (True,))
        graph.output(tuple(nodes[number] for number in kept))
        code = fx.GraphModule(modules, graph)
        key = code.code, (*map(id, modules.values()),), (*self._called_by(run),), self._compiler
        if key not in self._functions:
            if len(self._functions) == _MOST_KEPT:
                self._functions.clear()
            self._functions[key] = self._compiler(code)
        return self._functions[key], given

    def _called_by(self, run: Sequence[int]) -> Iterator[object]:
        """The functions that a run calls; those with names may be replaced temporarily."""
        for number in run:
            instruction = self.instructions[number]
            if isinstance(instruction, CallFunction):
                target = instruction.target
                yield target.name if isinstance(target, NamedFunction) else id(target)

    def _node(
        self,
        graph: fx.Graph,
        modules: dict[str, Any],
        instruction: Instruction,
        nodes: Mapping[int, fx.Node],
    ) -> fx.Node:
        args, kwargs = _with_nodes((instruction.args, instruction.kwargs), nodes)
        target = instruction.target
        if isinstance(instruction, CallMethod):
            return graph.call_method(target, args, kwargs)
        if isinstance(instruction, CallFunction):
            return graph.call_function(_called_by_name(target), args, kwargs)
        name = f"module_{len(modules)}"
        modules[name] = get_attribute(self._model, target)
        return graph.call_module(name, args, kwargs)


def _runs(part: StagePart, instructions: Sequence[Instruction]) -> Iterator[list[int]]:
    """The stage's instructions in order: those that are compiled together, or one that is not."""
    run: list[int] = []
    received: set[int] = set()
    for number in part.instructions:
        instruction = instructions[number]
        new = {value for value in references(instruction) if value in part.received} - received
        received |= new
        if isinstance(instruction, GetAttribute) and not _may_set(run, instruction, instructions):
            yield [number]  # before the run that it is in
            continue
        is_compiled = _compiles(instruction)
        if run and (new or not is_compiled):
            yield run
            run = []
        run.append(number)
        if number in part.sent_after or not is_compiled:
            yield run
            run = []
    if run:
        yield run


def _may_set(
    run: Sequence[int], attribute: GetAttribute, instructions: Sequence[Instruction]
) -> bool:
    """Whether a run calls a module that has the attribute, which may set it."""
    calls = (instructions[number] for number in run)
    return any(
        isinstance(call, CallModule) and f"{attribute.target}.".startswith(f"{call.target}.")
        for call in calls
    )


def _compiles(instruction: Instruction) -> bool:
    is_call = isinstance(instruction, CallModule | CallFunction | CallMethod)
    return is_call and _is_plain((instruction.args, instruction.kwargs))


def _is_plain(tree: Any) -> bool:
    """Whether torch.fx can write these arguments."""
    if type(tree) in (tuple, list, dict, slice):
        return all(map(_is_plain, parts_of(tree)))
    return type(tree) in _PLAIN


def _with_nodes(tree: Any, nodes: Mapping[int, fx.Node]) -> Any:
    if isinstance(tree, Ref):
        return nodes[tree.index]
    return rebuild(lambda part: _with_nodes(part, nodes), tree)


def _called_by_name(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``target``, with a name that torch.fx can write."""
    if isinstance(target, NamedFunction):  # it may be replaced temporarily
        owner, _, name = target.name.rpartition(".")
        return _of_module(NamedFunction(owner).resolve(), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return call


def _of_module(owner: Any, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    return call
