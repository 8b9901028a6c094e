"""The instructions of a traced model, as pure data, and the function that runs one.

A trace is a flat list of instructions, each one step of the model's forward pass: a call of one of
its layers, of a function, of a tensor's method. Arguments refer to the values of earlier
instructions by number. So any run of instructions can run anywhere, given the values of others
that it uses: a stage of a pipeline is such a run.

There is no generated code and no copy of the model: layers are called by their path, so the
modules, their names, hooks and modes are the user's own.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.data.trees import Tree, rebuilt
from lockstep.errors import ModelError

# Empty arguments.
_SIMPLE = frozenset((type(None), bool, int, float, str, type(...), torch.dtype, torch.device))


@dataclass(frozen=True)
class Ref:
    """A reference to the value of an instruction, anywhere inside arguments."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One step of a forward pass; its kind is its class.

    Attributes:
        target: what is fetched or called.
        args: positional arguments, with a ``Ref`` for each value.
        kwargs: keyword arguments, likewise.
        layer: index of its layer in ``Trace.layers``.
        no_grad: the model runs it, but not its surroundings, under ``torch.no_grad``.
    """

    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    layer: int = -1
    no_grad: bool = False


class Input(Instruction):
    """One of the model's inputs; ``target`` is its position, its keyword, or None for the one."""


class GetAttribute(Instruction):
    """A parameter, buffer, other tensor or module of the model; ``target`` is its path."""


class CallModule(Instruction):
    """Call a module; ``target`` is its path."""


class CallFunction(Instruction):
    """Call ``target``."""


class CallMethod(Instruction):
    """Call the method named ``target`` of the first argument."""


class Output(Instruction):
    """The model's return value: the one argument."""


@dataclass(frozen=True)
class NamedFunction:
    """A function of torch that is looked up by its name, ``torch.nn.functional.relu``, per call.

    For functions that cannot be pickled, and those that are replaced temporarily
    (``parallel.data_parallel.functional_patch``).
    """

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.resolve()(*args, **kwargs)

    def resolve(self) -> Any:
        """The current function of that name."""
        return functools.reduce(getattr, self.name.split(".")[1:], torch)

    @property
    def __name__(self) -> str:
        return self.name.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Apply:
    """Applies an autograd Function."""

    function: type[torch.autograd.Function]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


@dataclass(frozen=True)
class Made:
    """Describes an object of a plain class, which is made anew with these attributes."""

    kind: type
    attributes: dict[str, Any]

    def make(self) -> Any:
        """The object; ``__init__`` is not run."""
        made: Any = object.__new__(self.kind)
        vars(made).update(self.attributes)
        return made


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's attributes, if it consists of nothing else."""
    kind: Any = type(value)
    is_plain = (
        hasattr(value, "__dict__")
        and kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and not hasattr(kind, "__setstate__")
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )
    return vars(value) if is_plain else None


@dataclass(frozen=True)
class Decision:
    """A comparison of sizes by which the model's code has branched.

    The trace has only the branch taken: another outcome is an error.
    """

    function: Callable[[Any, Any], bool]
    outcome: bool

    def __call__(self, one: Any, other: Any) -> bool:
        if self.function(one, other) == self.outcome:
            return self.outcome
        raise ModelError(
            "In a pipeline, decisions that the model's code makes by sizes must be the same for "
            "every batch.",
            received=f"{self.__name__}({one}, {other}), first {self.outcome}",
            fix="Give all batches the same shape but for the number of samples, or use a data "
            "parallel strategy.",
        )

    @property
    def __name__(self) -> str:
        return self.function.__name__


def run_instruction(
    instruction: Instruction, model: nn.Module, fetch: Callable[[int], Any], inputs: Tree
) -> Any:
    """The value of one instruction.

    Args:
        instruction: the instruction.
        model: the model, for its layers and parameters.
        fetch: gives the value of another instruction by its number.
        inputs: the model's inputs; used by ``Input`` only.
    """
    args = [_resolve(argument, fetch) for argument in instruction.args]
    kwargs = {name: _resolve(argument, fetch) for name, argument in instruction.kwargs.items()}
    if not instruction.no_grad:
        return _evaluate(instruction, model, inputs, args, kwargs)
    with torch.no_grad():
        return _evaluate(instruction, model, inputs, args, kwargs)


def _resolve(tree: Any, fetch: Callable[[int], Any]) -> Any:
    """The same arguments with values in place of references.

    At the top level: a recursive closure is a reference cycle, and this one would
    keep the values until it is collected.
    """
    kind = type(tree)
    if kind is Ref:
        return fetch(tree.index)
    if kind in _SIMPLE:
        return tree
    rebuilt = rebuild(lambda part: _resolve(part, fetch), tree)
    return rebuilt.make() if kind is Made else rebuilt


def _evaluate(
    instruction: Instruction,
    model: nn.Module,
    inputs: Tree,
    args: list[Any],
    kwargs: dict[str, Any],
) -> Any:
    target = instruction.target
    match instruction:
        case CallModule():
            return _module_at(model, target)(*args, **kwargs)
        case CallFunction():
            return target(*args, **kwargs)
        case CallMethod():
            return getattr(args[0], target)(*args[1:], **kwargs)
        case GetAttribute():
            return get_attribute(model, target)
        case Input():
            return inputs if target is None else inputs[target]
        case Output():
            return args[0]
    raise AssertionError(instruction)


def _module_at(model: nn.Module, path: str) -> nn.Module:
    """Like ``get_submodule``, which takes longer than many layers do."""
    module = model
    for name in path.split(".") if path else ():
        module = module._modules[name]  # type: ignore[assignment]
    return module


def get_attribute(model: nn.Module, path: str) -> Any:
    """The attribute of a model at a dotted path; the model itself for the empty one."""
    return functools.reduce(getattr, path.split("."), model) if path else model


def references(instruction: Instruction) -> tuple[int, ...]:
    """Numbers of the instructions whose values it uses, each once."""
    found = _refs_in((instruction.args, instruction.kwargs))
    return tuple(dict.fromkeys(ref.index for ref in found))


def redirect(tree: Any, numbers: Callable[[int], int]) -> Any:
    """The same arguments with every reference renumbered."""
    if isinstance(tree, Ref):
        return Ref(numbers(tree.index))
    return rebuild(lambda part: redirect(part, numbers), tree)


def _refs_in(tree: Any) -> Iterator[Ref]:
    if isinstance(tree, Ref):
        yield tree
        return
    for part in parts_of(tree):
        yield from _refs_in(part)


def parts_of(tree: Any) -> list[Any]:
    """The parts of a container, one level deep; see ``rebuild``."""
    parts: list[Any] = []

    def add(part: Any) -> Any:
        parts.append(part)
        return part

    rebuild(add, tree)
    return parts


def contents_of(tree: Any) -> list[Any]:
    """All that containers and objects hold, however deep."""
    parts = parts_of(attributes_of(tree) or tree)
    return [one for part in parts for one in contents_of(part)] if parts else [tree]


def rebuild(change: Callable[[Any], Any], tree: Any) -> Any:
    """A container of the same kind with ``change`` applied to each of its parts.

    Containers are tuples, lists, dicts, slices and dataclasses; others are returned unchanged.
    """
    kind = type(tree)
    if kind is slice:
        return slice(change(tree.start), change(tree.stop), change(tree.step))
    if kind is torch.Size:  # which holds numbers only
        return tuple(map(change, tree))
    return tree if kind in (Ref, NamedFunction, Apply) else rebuilt(change, tree)
