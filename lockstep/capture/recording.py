"""Records the forward pass of a model while it runs on example data.

A model uses torch's functions for all that it does with tensors. A ``TorchFunctionMode`` sees each
call, runs it, and notes it as an instruction; arguments are recognised by identity. So the model's
own Python code runs on real values, and how it makes them does not matter. Sizes are numbers that
remember their origin (``sizes``): an instruction that uses the number of samples refers to it. Only
decisions (``if``, ``range``) are fixed in the trace.

``UntraceableError`` is raised for what cannot be noted: a decision that depends on the data, a
tensor from elsewhere, an attribute that forward sets. The module whose forward did it is the
culprit; the tracer makes it a leaf, which is called as a whole, and records again.

torch.fx runs models on proxies of values instead. They fail at code that asks for a value's type
(``isinstance``, factories given a size), and silently change some things: operators in place,
autograd Functions, ``no_grad``, random numbers from factories.
"""

import inspect
import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, handle_torch_function

from lockstep.capture.calls import (
    CallRecorder,
    LeafCall,
    autocast_state,
    describe,
    has_drawn,
    host_streams,
    name_of,
    streams_differ,
    telling,
)
from lockstep.capture.instruction_log import DataError, InstructionLog, Record, UntraceableError
from lockstep.capture.instructions import (
    Apply,
    CallFunction,
    Decision,
    Input,
    Instruction,
    Output,
    contents_of,
)
from lockstep.capture.sizes import has_numbers, plain
from lockstep.data.order import torch_streams
from lockstep.data.trees import Tree, tensors_of

# Layers of torch that only call others: these are traced through.
_CONTAINERS = (nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)

# Methods that hand a tensor's values or memory to code that is not torch's.
_ESCAPES = {"tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}

# Properties that a tensor has even if its sizes depend on the data.
_RANKS = {"dim", "ndim", "ndimension", "device"}

# Methods that would need the graph of earlier or later layers.
_NOT_RECORDED = {"backward", "grad", "register_hook", "register_post_accumulate_grad_hook"}


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is called as a whole by its nature: torch's own layers.

    The result of ``torch.compile`` is not: it is traced as the module. Subclasses of batch
    normalisation are leaves, too: their statistics are handled by layer.
    """
    if isinstance(module, _BatchNorm | torch.jit.ScriptModule):
        return True
    kind = type(module)
    is_torchs = kind.__module__.partition(".")[0] == "torch" and not hasattr(module, "_orig_mod")
    return is_torchs and kind not in _CONTAINERS and not isinstance(module, torch.fx.GraphModule)


def storage_of(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor, shared by its views; 0 for layouts without."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and the like
        return 0


def inputs_of(inputs: Tree) -> list[tuple[int | str | None, Any]]:
    """A model's arguments, with position or keyword; see ``parallel.data_parallel.forward``."""
    if isinstance(inputs, tuple):
        return list(enumerate(inputs))
    if isinstance(inputs, dict | UserDict):
        return list(inputs.items())
    return [(None, inputs)]


def _label(module: nn.Module) -> str:
    """A module's name for messages: Keras's layers have names."""
    name = getattr(module, "name", None)
    kind = type(module).__name__
    return f"{kind} {name!r}" if isinstance(name, str) else kind


def _place_in_code() -> str:
    """File and line of the model's code that is running; empty where it is torch's."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Recorder.record.__code__:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("torch", "lockstep"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Recorder(TorchFunctionMode):
    """Records one run of a model.

    Args:
        model: the model.
        leaves: paths of modules that are called as a whole, beside those of ``is_leaf``.
        grad_enabled: whether the model runs with gradients.
        is_told: ``is_compiling()`` is True for the model's code, but not within layers that are
            called as a whole.

    Attributes:
        culprit: path of the module that made it fail.
        inside: the module without a path that failed in there, see ``InstructionLog``.
        failure: the first thing that could not be noted; the model may have caught it.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Mapping[str, str],
        *,
        grad_enabled: bool,
        is_told: bool = False,
    ) -> None:
        super().__init__()
        self.culprit = ""
        self.inside = ""
        self.failure: UntraceableError | None = None
        self._model = model
        self._log = InstructionLog(model, self)
        self._leaves = leaves
        self._grad_enabled = grad_enabled
        self._is_told = is_told
        self._autocast = autocast_state()
        self._host_streams = host_streams()
        self._static: set[int] = set()  # storages that depend on sizes and constants alone
        self._ragged: set[int] = set()  # ids of tensors whose shape depends on the data
        self._stack: list[str] = []  # paths of the modules whose forward is running
        self._raised: BaseException | None = None
        self._watch = CallRecorder()
        self._thread = threading.get_ident()
        self._is_busy = False

    def record(self, inputs: Tree) -> list[Record]:
        """Run the model on inputs and note what it does.

        Raises:
            UntraceableError: or any error of the model.
        """
        log = self._log
        try:
            self._record(log, inputs)
        finally:
            # Sizes still in use keep this recorder alive, and need not keep all values. No cycle:
            # it would keep the model, with its shared memory, until it is collected.
            self._log = InstructionLog(self._model, weakref.proxy(self))
        return log.records

    def _record(self, log: InstructionLog, inputs: Tree) -> None:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for target, value in inputs_of(inputs):
            noted = log.add(Input(target=target), value, removable=True)
            if isinstance(target, str):
                kwargs[target] = noted
            else:
                args.append(noted)
        with self._watch, self._patched(), telling(self._is_told), self:
            output = self._model(*args, **kwargs)
        if self.failure is not None:
            raise self.failure
        self.culprit = ""
        log.add(Output(args=(log.argument(output),)), None)

    # --- calls ------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._is_busy = True
        try:
            with telling(False):
                return self._call(func, args, kwargs or {})
        except UntraceableError as error:
            self._keep(error)
            raise
        finally:
            self._is_busy = False

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_call(func)
        tensors = list(tensors_of((args, kwargs)))
        versions = [tensor._version for tensor in tensors]
        stream = torch_streams()
        given = contents_of((args, kwargs)) if isinstance(func, LeafCall | Apply) else []
        self._watch.reset()
        result = func(*plain(args), **plain(kwargs))
        self._host_streams = host_streams()
        if isinstance(func, LeafCall):
            self._log.check_own(func, self._watch.used.difference(map(id, tensors)))
        changed = [
            tensor
            for tensor, version in zip(tensors, versions, strict=True)
            if tensor._version != version
        ]
        made = list(tensors_of(result))
        if name_of(func) == "to" and made and made[0] is args[0]:
            return result  # a parameter of the right kind already: nothing was made
        self._check_result(func, tensors, result, made)
        self._mark(func, tensors, made, changed)
        if not (made or changed):
            if not tensors or not (result is None or has_numbers(result)):
                return result
            if result is not None and all(map(self._log.path_of, tensors)):
                return self._ask_elsewhere(result)
        if given and list(map(id, given)) != list(map(id, contents_of((args, kwargs)))):
            raise UntraceableError("hands an object to a layer that changes it")
        instruction = self._instruction(func, args, kwargs)
        is_question = not made and not changed and result is not None
        has_drawn_here = has_drawn(stream) or (
            self._watch.draws and any(tensor.is_meta for tensor in made)
        )
        return self._log.add(instruction, result, removable=is_question, draws=has_drawn_here)

    def _check_call(self, func: Any) -> None:
        self._check_host_streams()
        if not isinstance(func, LeafCall) and name_of(func) in _NOT_RECORDED:
            raise UntraceableError(f"calls {name_of(func)}")
        if autocast_state() != self._autocast:
            raise UntraceableError("changes autocast")
        if torch.is_inference_mode_enabled() or (
            torch.is_grad_enabled() and not self._grad_enabled
        ):
            raise UntraceableError("changes whether gradients are computed")

    def _check_result(
        self, func: Any, tensors: list[torch.Tensor], result: Any, made: list[torch.Tensor]
    ) -> None:
        """Refuse a number that is no size, or a size that depends on values."""
        if result is None or isinstance(func, LeafCall) or self._is_static(func, tensors):
            return
        name = name_of(func)
        is_ragged = any(id(tensor) in self._ragged for tensor in tensors)
        if made:
            if is_ragged and type(result) in (tuple, list):
                raise UntraceableError(f"makes as many tensors as the data says ({name})")
        elif self._watch.reads_data or name in _ESCAPES:
            raise DataError(f"uses a tensor's values outside torch ({name})")
        elif is_ragged and name not in _RANKS and has_numbers(result):
            raise UntraceableError(f"uses a size that depends on the data ({name})")

    def _is_static(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Whether a call's result depends on sizes and constants alone."""
        return not (self._watch.draws or isinstance(func, LeafCall)) and all(
            storage_of(tensor) in self._static for tensor in tensors
        )

    def _mark(
        self,
        func: Any,
        tensors: list[torch.Tensor],
        made: list[torch.Tensor],
        changed: list[torch.Tensor],
    ) -> None:
        if self._is_static(func, tensors):
            self._static |= {storage_of(tensor) for tensor in made}
            return
        self._static -= {storage_of(tensor) for tensor in changed}
        is_ragged = any(id(tensor) in self._ragged for tensor in tensors)
        if is_ragged or self._watch.chooses_by_value:
            # A tensor with the shape of one that is not ragged is assumed to have it from there.
            regular = {tensor.shape for tensor in tensors if id(tensor) not in self._ragged}
            self._ragged |= {
                id(tensor) for tensor in made if tensor.dim() > 0 and tensor.shape not in regular
            }

    def _ask_elsewhere(self, value: Any) -> Any:
        """A property of a parameter: its sizes never change; others depend on where it is."""
        return self._log.ask_device(value) if isinstance(value, torch.device) else value

    def _instruction(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Instruction:
        kind, target, args = describe(func, args)
        return kind(
            target=target,
            args=tuple(map(self._log.argument, args)),
            kwargs={name: self._log.argument(value) for name, value in kwargs.items()},
            no_grad=self._grad_enabled and not torch.is_grad_enabled(),
        )

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Note a calculation with sizes."""
        if not all(isinstance(argument, int | float) for argument in args):
            return NotImplemented
        result = function(*plain(args))
        if not self._is_listening() or not isinstance(result, int | float):
            return result
        refs = tuple(map(self._log.argument, args))
        return self._log.add(CallFunction(target=function, args=refs), result, removable=True)

    def compare(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Note a decision of the model's code that depends on sizes."""
        if not all(isinstance(argument, int | float) for argument in args):
            return NotImplemented
        result = function(*plain(args))
        if self._is_listening():
            refs = tuple(map(self._log.argument, args))
            self._log.add(CallFunction(target=Decision(function, result), args=refs), result)
        return result

    def _is_listening(self) -> bool:
        return bool(self._stack) and not self._is_busy and threading.get_ident() == self._thread

    def _check_host_streams(self) -> None:
        """Refuse Python code that draws random numbers: they may decide what it does."""
        if streams_differ(self._host_streams, host_streams()):
            self._host_streams = host_streams()
            raise UntraceableError("draws random numbers that are not torch's")

    def _keep(self, failure: UntraceableError) -> None:
        """Keep the first failure: the model may catch the error."""
        if self.failure is None:
            self.failure = failure
            failure.place = _place_in_code()
            self.culprit, self.inside = self._log.scope, self._log.inside

    # --- replaced while recording -----------------------------------------------------------------

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrap in (
                (nn.Module, "__call__", self._wrap_call),
                (nn.Module, "__setattr__", self._wrap_setattr),
                (nn.Module, "__delattr__", self._wrap_setattr),
                (torch.autograd.Function, "apply", self._wrap_apply),
            ):
                original = vars(owner)[name]
                setattr(owner, name, wrap(original))
                stack.callback(setattr, owner, name, original)
            for names in self._namespaces():
                names["len"] = self._len
                stack.callback(names.pop, "len")
            yield

    def _wrap_call(self, original: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._log.path_of(module)
            is_model = module is self._model and not self._stack and not self._is_busy
            if not (is_model or self._is_listening()):
                return original(module, *args, **kwargs)
            if path is None:
                return self._pass_through(module, lambda: original(module, *args, **kwargs))
            if path in self._leaves or is_leaf(module):
                leaf = LeafCall(path, module, lambda *a, **k: original(module, *a, **k))
                return handle_torch_function(leaf, (), *args, **kwargs)
            return self._enter(path, lambda: original(module, *args, **kwargs))

        return call

    def _enter(self, path: str, forward: Callable[[], Any]) -> Any:
        """Trace through a module."""
        self._stack.append(path)
        self._log.scope = path
        outside, self._log.inside = self._log.inside, ""
        try:
            result = forward()
            self._check_host_streams()
            return result
        except Exception as error:
            self._blame(error)
            raise
        finally:
            self._stack.pop()
            self._log.scope = self._stack[-1] if self._stack else ""
            self._log.inside = outside

    def _pass_through(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Trace through a module that is no layer of its own, and keep its name for messages."""
        outside, self._log.inside = self._log.inside, _label(module)
        try:
            return forward()
        except Exception as error:
            self._blame(error)
            raise
        finally:
            self._log.inside = outside

    def _blame(self, error: Exception) -> None:
        """Make the innermost module the culprit of an error."""
        if isinstance(error, UntraceableError):
            self._keep(error)
        elif self.failure is None and self._raised is not error:
            self._raised = error
            self.culprit, self.inside = self._log.scope, self._log.inside

    def _wrap_setattr(self, original: Any) -> Any:
        def change(module: nn.Module, name: str, *value: Any) -> None:
            is_new = not value or value[0] is not getattr(module, name, None)
            if is_new and self._is_listening() and self._log.path_of(module) is not None:
                failure = UntraceableError(f"changes attribute {name!r} in forward")
                self._keep(failure)
                raise failure
            original(module, name, *value)

        return change

    def _wrap_apply(self, original: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_listening():
                return handle_torch_function(Apply(cls), (), *args, **kwargs)
            return original.__get__(None, cls)(*args, **kwargs)

        return classmethod(apply)

    def _namespaces(self) -> list[dict[str, Any]]:
        """Globals of the model's own modules: there, ``len`` returns traced sizes."""
        found = {}
        for kind in {type(module) for module in self._model.modules()}:
            names = getattr(inspect.unwrap(kind.forward), "__globals__", {"len": len})
            is_torchs = str(names.get("__name__")).partition(".")[0] == "torch"
            if "len" not in names and not is_torchs:
                found[id(names)] = names
        return list(found.values())

    def _len(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > 0 and self._is_listening():
            return value.size(0)
        return len(value)
