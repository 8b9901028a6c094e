"""Pickles torch objects that pickle does not support, or reduces differently.

Operators are sent by name. The helper defines the script's custom operators again, also if the
script only refers to them by name (``torch.ops.mine.op``). Compiled TorchScript is sent as a file
in its own format.
"""

import inspect
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn.utils import parametrize

from lockstep import accelerators
from lockstep.pickling import Pickler, attribute_of


def reduce(obj: Any, pickler: Pickler) -> Any:
    """The result of ``reducer_override`` for an object; NotImplemented for all others."""
    if obj is torch.ops:
        return _operators(pickler)
    if isinstance(obj, nn.Module):
        return _module(obj)
    if isinstance(obj, HigherOrderOperator):
        return attribute_of, ("torch.ops", ("higher_order", obj.name()))
    reduce_one = _TABLE.get(type(obj))
    return NotImplemented if reduce_one is None else reduce_one(obj, pickler)


# --- small objects --------------------------------------------------------------------------------


def _constant(constant: Any, pickler: Pickler) -> Any:
    # Pickle has only the name: it would search all modules for it, find it in the script, which has
    # imported torch, and make the receiver search there.
    return getattr, (torch, str(constant).removeprefix("torch."))


def _device(device: torch.device, pickler: Pickler) -> Any:
    if device.type == accelerators.kind():
        return accelerators.current, (device.type,)
    return NotImplemented


def _limits(limits: Any, pickler: Pickler) -> Any:
    return type(limits), (getattr(torch, limits.dtype),)


# --- operators ------------------------------------------------------------------------------------


def _packet(packet: OpOverloadPacket, pickler: Pickler) -> Any:
    namespace, name = packet._qualified_op_name.split("::")
    return getattr, (getattr(torch.ops, namespace), name)


def _overload(overload: OpOverload, pickler: Pickler) -> Any:
    return getattr, (overload._overloadpacket, overload._overloadname)


def _operators(pickler: Pickler) -> Any:
    own = [one for one in OPDEFS.values() if not pickler.finds(one._init_fn.__module__)]
    return _operators_with, (own,)


def _operators_with(operators: list[CustomOpDef]) -> Any:
    return torch.ops


def _custom(operator: CustomOpDef, pickler: Pickler) -> Any:
    place = pickler.place_of(operator)
    if place is not None:
        return attribute_of, place
    made_of = operator._namespace, operator._name, operator._schema, operator._tags
    functions = (
        {device: _kernel(one) for device, one in operator._backend_fns.items()},
        (operator._abstract_fn, operator._setup_context_fn, operator._backward_fn),
        operator._vmap_fn,
    )
    return _define, made_of, (operator._init_fn, functions), None, None, _fill_custom


def _kernel(registered: Any) -> Any:
    """The user's function inside of torch's wrapper."""
    return inspect.getclosurevars(inspect.unwrap(registered)).nonlocals["fn"]


def _define(namespace: str, name: str, schema: str, tags: Any) -> CustomOpDef:
    known = OPDEFS.get(f"{namespace}::{name}")
    return CustomOpDef(namespace, name, schema, _undefined, tags) if known is None else known


def _undefined(*args: Any) -> Any:
    raise AssertionError("the operator's function was not received")


def _fill_custom(operator: CustomOpDef, state: Any) -> None:
    operator._init_fn, (kernels, gradient, vmap) = state
    for device, function in kernels.items():
        operator.register_kernel(device)(function)
    operator._abstract_fn, operator._setup_context_fn, operator._backward_fn = gradient
    if vmap is not None:
        operator.register_vmap(vmap)


# --- modules --------------------------------------------------------------------------------------


def _module(module: nn.Module) -> Any:
    compiler = _compiler_of(module)
    if isinstance(module, torch.jit.ScriptModule):
        return _script(module)
    if parametrize.is_parametrized(module):
        # torch makes a class for it, a subclass of the user's, which cannot be pickled.
        original = type(module).__mro__[1]
        whole = {**vars(module), "_compiled_call_impl": None}, compiler
        return blank, (original,), whole, None, None, _fill_parametrized
    if compiler is not None:
        # Its own pickling drops ``module.compile()``: ranks would compute differently.
        state = module.__getstate__(), compiler
        return blank, (type(module),), state, None, None, _fill_compiled
    return NotImplemented


def _compiler_of(module: nn.Module) -> Any:
    """The compiler of ``module.compile()``; None if not compiled, or if dynamo is disabled."""
    if module._compiled_call_impl is None:
        return None
    return inspect.getclosurevars(module._compiled_call_impl).nonlocals.get("self")


def blank(kind: Any) -> Any:
    """An object without attributes."""
    return kind.__new__(kind)


def _fill_compiled(module: nn.Module, contents: tuple[dict[str, Any], Any]) -> None:
    state, compiler = contents
    module.__setstate__(state)
    module._compiled_call_impl = compiler(module._call_impl)


def _fill_parametrized(module: Any, contents: tuple[dict[str, Any], Any]) -> None:
    state, compiler = contents
    vars(module).update(state)
    if compiler is not None:
        module._compiled_call_impl = compiler(module._call_impl)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


# --- TorchScript ----------------------------------------------------------------------------------


def _script(script: Any, pickler: Pickler | None = None) -> Any:
    return _load_script, (script.save_to_buffer(),)


def _load_script(file: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the script has received it
        return torch.jit.load(io.BytesIO(file))


_TABLE: dict[Any, Callable[[Any, Pickler], Any]] = {
    torch.memory_format: _constant,
    torch.layout: _constant,
    torch.device: _device,
    torch.finfo: _limits,
    torch.iinfo: _limits,
    OpOverloadPacket: _packet,
    OpOverload: _overload,
    CustomOpDef: _custom,
    torch.jit.ScriptFunction: _script,
}
