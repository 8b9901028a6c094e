"""``lockstep.device``: assigns layers to devices in the model's own code.

Within ``with lockstep.device(0):`` every module that gets a parameter, or that becomes an attribute
of another module, is marked. Scopes nest: the innermost counts, and a module's own mark counts
before its container's. The mark is an attribute of the module: it is copied and sent with it, and
does not change its behaviour.

Keras layers on the torch backend are modules, too. They make their variables when they are built,
so a layer is marked if it becomes an attribute, or is called, within the scope.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lockstep.errors import OptionError

_MARK = "_lockstep_device"
_current: ContextVar[int | None] = ContextVar("lockstep_device", default=None)


@contextmanager
def device(index: int | str) -> Iterator[None]:
    """Within the block, layers are made for a device, on which ``PipelineStrategy`` places them.

    Args:
        index: number of the device, from 0; or a name such as ``"cpu:1"`` or ``"cuda:1"``.

    Raises:
        OptionError: neither.
    """
    token = _current.set(_index(index))
    hooks = (
        register_module_parameter_registration_hook(_mark_owner),
        register_module_module_registration_hook(_mark_child),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _current.reset(token)


def device_of(model: nn.Module, path: str) -> int | None:
    """The device that scopes give a module: its own mark, or its container's."""
    while True:
        mark = vars(model.get_submodule(path)).get(_MARK)
        if mark is not None or not path:
            return mark
        path = path.rpartition(".")[0]


def _mark_owner(owner: nn.Module, name: str, parameter: object) -> None:
    _mark(owner)


def _mark_child(owner: nn.Module, name: str, child: object) -> None:
    if isinstance(child, nn.ParameterDict | nn.ParameterList):
        _mark(owner)  # a container of a layer's parameters, and no layer itself
    elif isinstance(child, nn.Module):
        _mark(child)


def _mark(module: nn.Module) -> None:
    current = _current.get()
    if current is not None and _MARK not in vars(module):
        vars(module)[_MARK] = current


def _index(device: object) -> int:
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    match = re.fullmatch(r"(?:cpu|cuda):(\d+)", device) if isinstance(device, str) else None
    if match is None:
        raise OptionError(
            "A device is a number from 0, or a name with one.",
            received=f"device({device!r})",
            fix="Use device(1), device('cpu:1') or device('cuda:1').",
        )
    return int(match[1])
