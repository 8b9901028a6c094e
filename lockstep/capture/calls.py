"""Calls of torch's functions: as instructions, and the operators that they run."""

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import accelerators
from lockstep.capture.instructions import (
    CallFunction,
    CallMethod,
    CallModule,
    Instruction,
    NamedFunction,
)
from lockstep.data.order import torch_streams
from lockstep.data.trees import tensors_of

# How torch's function mode sees the properties of tensors.
_ACCESS = {"__get__": getattr, "__set__": setattr}


class LeafCall:
    """A call of a module as a whole.

    Args:
        path: of the module.
        module: the module.
        call: calls it.

    Attributes:
        own: ids of its tensors.
    """

    def __init__(self, path: str, module: nn.Module, call: Callable[..., Any]) -> None:
        self.path = path
        self.own = {*map(id, module.parameters()), *map(id, module.buffers())}
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class CallRecorder(TorchDispatchMode):
    """Records the kinds of operators that a call runs.

    Attributes:
        reads_data: the call makes a number of a tensor's values.
        chooses_by_value: the shape of its result depends on values.
        draws: the call may draw random numbers.
        used: ids of tensors that its operators get.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True, or torch imports torch.compile only to disable it: a second."""
        return False

    def reset(self) -> None:
        """Forget the call before."""
        self.reads_data = False
        self.chooses_by_value = False
        self.draws = False
        self.used: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tags = func.tags
        self.used.update(map(id, tensors_of(args)))
        self.reads_data |= torch.Tag.data_dependent_output in tags
        self.draws |= torch.Tag.nondeterministic_seeded in tags
        if torch.Tag.dynamic_output_shape in tags:
            self.chooses_by_value |= func is not torch.ops.aten.index.Tensor or any(
                index.dtype in (torch.bool, torch.uint8) for index in tensors_of(args[1])
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within the block code that torch.compile or TorchScript has compiled runs uncompiled.

    Code whose first call is under a dispatch mode would never be compiled afterwards.
    """
    with ExitStack() as stack:
        stack.enter_context(scripts_as_python())
        if "torch._dynamo" in sys.modules:  # else nothing is, and it takes a second to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


_run_script = torch.jit.ScriptFunction.__call__
_num_blocks = 0
_lock = threading.Lock()  # Trainers may train in several threads


@contextmanager
def scripts_as_python() -> Iterator[None]:
    """Within the block functions of TorchScript run as the Python that they were made from.

    A script shows its operations to no mode, takes plain tensors only, and rounds otherwise from
    its third call on.
    """
    global _num_blocks
    with _lock:
        _num_blocks += 1
        torch.jit.ScriptFunction.__call__ = _run_python  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if not _num_blocks:
                torch.jit.ScriptFunction.__call__ = _run_script  # type: ignore[method-assign]


def _run_python(script: Any, *args: Any, **kwargs: Any) -> Any:
    function = getattr(script, "_torchdynamo_inline", None)  # None in a script from a file
    return _run_script(script, *args, **kwargs) if function is None else function(*args, **kwargs)


@contextmanager
def telling(is_traced: bool) -> Iterator[None]:
    """Tell code that asks ``torch.compiler.is_compiling()`` whether it is traced.

    A trace cannot follow code that looks at values. Code that asks leaves such parts out: a
    warning, or a mask that would change nothing.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = is_traced
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def host_streams() -> tuple[Any, ...]:
    """States of Python's and NumPy's random streams."""
    return random.getstate(), np.random.get_state()


def streams_differ(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether random numbers were drawn from them."""
    (python, numpy), (other_python, other_numpy) = before, now
    return bool(
        python != other_python
        or numpy[2:] != other_numpy[2:]
        or not np.array_equal(numpy[1], other_numpy[1])
    )


def name_of(func: Any) -> str:
    """The name of a function, method or property of tensors."""
    if isinstance(func, LeafCall):
        return "call"
    name = getattr(func, "__name__", type(func).__name__)
    if name not in _ACCESS:
        return str(name)
    described = func.__self__  # a property of Tensor
    return str(getattr(described, "__name__", None) or described.fget.__name__)


def describe(func: Any, args: tuple[Any, ...]) -> tuple[type[Instruction], Any, tuple[Any, ...]]:
    """The kind of instruction, its target and arguments."""
    if isinstance(func, LeafCall):
        return CallModule, func.path, args
    name = name_of(func)
    access = _ACCESS.get(getattr(func, "__name__", ""))
    if access is not None:
        return CallFunction, access, (args[0], name, *args[1:])
    if args and isinstance(args[0], torch.Tensor) and hasattr(torch.Tensor, name):
        is_method = torch.overrides.is_tensor_method_or_property(func)
        if is_method or getattr(torch.Tensor, name) is func:
            return CallMethod, name, args
    return CallFunction, _portable(func), args


def _portable(func: Any) -> Any:
    """A function that can be pickled; those of ``torch.nn.functional`` by name."""
    name = name_of(func)
    if getattr(F, name, None) is func:
        return NamedFunction(f"torch.nn.functional.{name}")
    try:
        pickle.dumps(func)
    except Exception:  # of any class: the function's own reduction raises it
        named = NamedFunction(f"torch.ops.{func}")
        try:
            return named if named.resolve() is func else func
        except (AttributeError, RuntimeError):
            return func
    return func


def has_drawn(stream: torch.Tensor) -> bool:
    """Whether torch's random stream has another state than ``stream``."""
    return not torch.equal(stream, torch_streams())


def autocast_state() -> tuple[Any, ...]:
    """Whether autocast is on, and for which types."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", accelerators.kind() or "cpu")
    )
