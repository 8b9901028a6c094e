"""Divides recorded instructions into layers: the pieces between which a model can be cut.

Each call of a module begins a layer, and so does the first use of a parameter in the model's own
code. Instructions in between, such as additions and reshapes, belong to the layer before. Every
layer fetches the parameters that it uses, right before their first use: none is ever sent.
Likewise, every layer takes the parts and sizes of the model's inputs that it uses.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.capture.instruction_log import Record
from lockstep.capture.instructions import (
    CallModule,
    GetAttribute,
    Input,
    Instruction,
    Output,
    get_attribute,
    redirect,
    references,
)
from lockstep.capture.layers import BatchLayer, FrontEndLayer, kind_of


@dataclass(frozen=True, kw_only=True)
class TracedLayer:
    """A run of instructions.

    Attributes:
        name: path of the module that it calls, or that owns the parameter it begins with; further
            ones of that path are ``path@2`` and so on.
        kind: the module's class name; "function" where it calls none.
        parameters: those that it uses, each under its first name in the model.
        buffers: likewise.
        is_atomic: the module could not be traced through.
        reason: why, in one line.
        uses_batch_statistics: its output for one sample depends on the whole batch.
        draws: it draws random numbers.
    """

    name: str
    kind: str
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    is_atomic: bool = False
    reason: str = ""
    uses_batch_statistics: bool = False
    draws: bool = False


@dataclass(frozen=True, kw_only=True)
class Layered:
    """Instructions in layers.

    Attributes:
        instructions: in order, layer by layer.
        layers: in order.
        records: for each instruction the number of its record.
    """

    instructions: tuple[Instruction, ...]
    layers: tuple[TracedLayer, ...]
    records: tuple[int, ...]


@dataclass
class _Group:
    """A layer being built: numbers of records."""

    path: str
    calls: bool
    members: list[int] = field(default_factory=list)
    owned: set[str] = field(default_factory=set)


def divide(model: nn.Module, records: Sequence[Record], atomic: Mapping[str, str]) -> Layered:
    """Divide records into layers, without unused ones.

    Args:
        model: the model.
        records: of the model.
        atomic: paths of modules that could not be traced through, and why.
    """
    names = _Names(model)
    free = _free(records)
    groups = _group(records, _used(records), free, names)
    emitter = _Emitter(records, free)
    layers: list[TracedLayer] = []
    counts: dict[str, int] = {}
    for number, group in enumerate(groups):
        fetched = emitter.emit(group.members, number)
        count = counts[group.path] = counts.get(group.path, 0) + 1
        layers.append(
            replace(
                _describe(model, group, names, fetched, atomic),
                draws=any(records[member].draws for member in group.members),
                uses_batch_statistics=_sees_batch(model, records, group),
                name=group.path if count == 1 else f"{group.path}@{count}",
            )
        )
    return Layered(
        instructions=tuple(emitter.instructions),
        layers=tuple(layers),
        records=tuple(emitter.origins),
    )


class _Names:
    """First names of a model's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters = {id(value): name for name, value in model.named_parameters()}
        self.buffers = {id(value): name for name, value in model.named_buffers()}

    def inside(self, module: nn.Module) -> set[str]:
        """The first names of everything in a module."""
        return {self.parameters[id(value)] for value in module.parameters()} | {
            self.buffers[id(value)] for value in module.buffers()
        }

    def owner(self, path: str) -> str:
        """Path of the module that an attribute belongs to, or is."""
        is_module = isinstance(get_attribute(self._model, path), nn.Module)
        return path if is_module else path.rpartition(".")[0]

    def is_whole(self, path: str) -> bool:
        """Whether consecutive uses of a module's parameters are one layer."""
        return isinstance(self._model.get_submodule(path), FrontEndLayer)

    def at(self, path: str) -> set[str]:
        """The first names of an attribute, or of its contents."""
        value = get_attribute(self._model, path)
        if isinstance(value, nn.Module):
            return self.inside(value)
        name = self.parameters.get(id(value)) or self.buffers.get(id(value))
        return {name} if name else set()


def _used(records: Sequence[Record]) -> list[bool]:
    used = [not record.removable for record in records]
    for number in reversed(range(len(records))):
        if used[number]:
            for index in references(records[number].instruction):
                used[index] = True
    return used


def _free(records: Sequence[Record]) -> list[bool]:
    """True for what any layer can get: inputs, attributes, and metadata of inputs."""
    free: list[bool] = []
    for record in records:
        used = references(record.instruction)
        is_fetched = isinstance(record.instruction, Input | GetAttribute)
        is_asked = record.removable and bool(used) and all(free[index] for index in used)
        free.append(is_fetched or is_asked)
    return free


def _group(
    records: Sequence[Record], used: Sequence[bool], free: Sequence[bool], names: _Names
) -> list[_Group]:
    groups: list[_Group] = []
    early: list[int] = []  # before the first layer
    for number in range(len(records)):
        if not used[number] or free[number]:
            continue
        begun = _begin(records, number, groups, names)
        if begun is not None:
            groups.append(begun)
        (groups[-1].members if groups else early).append(number)
    if not groups:
        groups.append(_Group("", calls=False))
    groups[0].members[:0] = early
    return groups


def _begin(
    records: Sequence[Record], number: int, groups: list[_Group], names: _Names
) -> _Group | None:
    """The layer that an instruction begins, if it does."""
    instruction = records[number].instruction
    if isinstance(instruction, Output):
        return None
    paths = [
        records[index].instruction.target
        for index in references(instruction)
        if isinstance(records[index].instruction, GetAttribute)
    ]
    if isinstance(instruction, CallModule):
        owned = names.at(instruction.target).union(*map(names.at, paths))
        return _Group(instruction.target, calls=True, owned=owned)
    present = groups[-1].owned if groups else set()
    missing = [path for path in paths if not names.at(path) <= present]
    if not missing:
        return None
    owner = names.owner(missing[0])
    if groups and owner == groups[-1].path and names.is_whole(owner):
        groups[-1].owned = present.union(*map(names.at, paths))
        return None
    group = _Group(owner, calls=False, owned=set().union(*map(names.at, paths)))
    if groups:
        group.members = _take_back(records, groups[-1], owner)
    return group


def _take_back(records: Sequence[Record], group: _Group, owner: str) -> list[int]:
    """Move what a module computes before it first uses its parameter into its layer."""
    kept = len(group.members)
    while kept > 1 and owner not in ("", group.path):
        record = records[group.members[kept - 1]]
        if isinstance(record.instruction, CallModule) or not _is_within(record.scope, owner):
            break
        kept -= 1
    taken = group.members[kept:]
    del group.members[kept:]
    return taken


def _is_within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


class _Emitter:
    """Writes instructions in their final order and numbers."""

    def __init__(self, records: Sequence[Record], free: Sequence[bool]) -> None:
        self.instructions: list[Instruction] = []
        self.origins: list[int] = []
        self._records = records
        self._free = free
        self._places: dict[int, int] = {}
        self._present: set[int] = set()  # free records already in the current layer

    def emit(self, members: Iterable[int], layer: int) -> list[str]:
        """One layer; returns the paths of the attributes that it fetches."""
        # An input is one instruction: each layer that uses it reads it.
        inputs = {one for one in self._places if isinstance(self._at(one), Input)}
        self._present = set(inputs)
        for number in members:
            self._emit(number, layer)
        fetched = [self._at(index) for index in sorted(self._present - inputs)]
        return [one.target for one in fetched if isinstance(one, GetAttribute)]

    def _at(self, number: int) -> Instruction:
        return self._records[number].instruction

    def _emit(self, number: int, layer: int) -> None:
        for index in references(self._at(number)):
            if self._free[index] and index not in self._present:
                self._present.add(index)
                self._emit(index, layer)
        self._append(number, layer)

    def _append(self, number: int, layer: int) -> None:
        instruction = self._records[number].instruction
        args, kwargs = redirect((instruction.args, instruction.kwargs), self._places.__getitem__)
        self._places[number] = len(self.instructions)
        self.instructions.append(replace(instruction, args=args, kwargs=kwargs, layer=layer))
        self.origins.append(number)


def _describe(
    model: nn.Module,
    group: _Group,
    names: _Names,
    fetched: Iterable[str],
    atomic: Mapping[str, str],
) -> TracedLayer:
    module = model.get_submodule(group.path)
    used = group.owned.union(*map(names.at, fetched))
    return TracedLayer(
        name=group.path,
        kind=kind_of(module) if group.calls or names.is_whole(group.path) else "function",
        parameters=tuple(name for name in names.parameters.values() if name in used),
        buffers=tuple(name for name in names.buffers.values() if name in used),
        is_atomic=group.calls and group.path in atomic,
        reason=atomic.get(group.path, "") if group.calls else "",
    )


def _sees_batch(model: nn.Module, records: Sequence[Record], group: _Group) -> bool:
    """Whether a layer normalises by statistics of the batch, in the mode in which it was traced."""
    module = model.get_submodule(group.path)
    return (
        any(_normalises(records[member].instruction) for member in group.members)
        or isinstance(module, BatchLayer)
        or (group.calls and any(map(_is_in_training, module.modules())))
    )


def _normalises(call: Instruction) -> bool:
    if getattr(call.target, "__name__", "") != "batch_norm":
        return False
    training = call.args[5] if len(call.args) > 5 else call.kwargs.get("training", False)
    return training is not False


def _is_in_training(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
