"""Models given as a function that makes them: each rank initializes only its own part.

The function runs with parameters on the meta device, where they have a shape and no memory. Then
they get addresses, but pages only when the rank that holds them first writes them: by
``reset_parameters`` of the module that owns them, then by ``_init_weights(module)`` of a model
around it, as in transformers, from a random stream that depends on the module's name alone. So a
model has the same initial values under every strategy, and no rank needs memory for all of it.
Every rank makes the buffers, as the function does. A model on the meta device is accepted as well,
if it has no buffers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.data.order import (
    holds_streams,
    restore_streams,
    seed_streams,
    stream_seed,
    stream_states,
)
from lockstep.errors import ModelError, OptionError
from lockstep.formatting import first_few
from lockstep.parallel.storage.store import TensorStore, tensor_spec
from lockstep.plan.layout import flat_offsets

_MARK = "_lockstep_blank"


def build_on_meta(function: Callable[[], nn.Module]) -> nn.Module:
    """Run a function that makes a model; its parameters are on the meta device.

    Raises:
        OptionError: it returns no module.
        ModelError: a module has parameters and no ``reset_parameters`` to give them values.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    # The hook's result replaces the parameter, although its type does not say so.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        model = function()
    finally:
        hook.remove()
    if not isinstance(model, nn.Module):
        raise OptionError(
            "A function given as `model` must return a torch.nn.Module.",
            received=type(model).__name__,
            fix="Return the model.",
        )
    _check_resets(model)
    return model


def check_on_meta(model: nn.Module) -> None:
    """Check that a model on the meta device can be initialized.

    Raises:
        ModelError: it has buffers there, or parameters elsewhere, or see ``build_on_meta``.
    """
    unknown = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    unknown += [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if unknown:
        raise ModelError(
            "A model on the meta device must have all its parameters there and no buffers, whose "
            "values would be unknown.",
            received=f"parameters elsewhere, or buffers on meta: {first_few(unknown)}",
            fix="Pass the function that makes the model: Trainer(lambda: Net(), ...).",
        )
    _check_resets(model)


def _check_resets(model: nn.Module) -> None:
    helpless = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if any(one is not None for one in module._parameters.values())
        and not _resets_of(module, name, model)
    ]
    if helpless:
        raise ModelError(
            "Modules of a model on the meta device need reset_parameters, or _init_weights(module) "
            "of a model around them, to initialise their parameters.",
            received=f"modules with parameters and without either: {first_few(helpless)}",
            fix="Give them a method reset_parameters(self), or pass the model itself.",
        )


def _own_reset(module: nn.Module) -> Callable[[], object] | None:
    # MultiheadAttention has it under another name.
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _resets_of(module: nn.Module, path: str, model: nn.Module) -> list[Callable[[], object]]:
    """The functions of a module and its model that initialize the module's parameters."""
    own = _own_reset(module)
    found = [] if own is None else [own]
    while path:
        path = path.rpartition(".")[0]
        if callable(around := getattr(model.get_submodule(path), "_init_weights", None)):
            return [*found, partial(around, module)]
    return found


def allocate(model: nn.Module) -> None:
    """Give the parameters of a model on the meta device addresses, without memory yet."""
    named = list(model.named_parameters())
    made = blank_parameters([tensor_spec(name, parameter) for name, parameter in named])
    places: dict[int, nn.Parameter] = {}
    for (_, parameter), place in zip(named, made, strict=True):
        place.requires_grad_(parameter.requires_grad)
        places[id(parameter)] = place
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                module._parameters[name] = places[id(own)]


def blank_parameters(specs: Sequence[TensorSpec]) -> list[nn.Parameter]:
    """Parameters with addresses, without memory or values yet."""
    _, num_bytes = flat_offsets([spec.extent for spec in specs])
    store = TensorStore(specs, SharedRegion.create(num_bytes, [(0, num_bytes)]))
    made = [nn.Parameter(view, view.is_floating_point()) for view in store.views]
    for parameter in made:
        setattr(parameter, _MARK, True)
    return made


def blank_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters without values yet."""
    return frozenset(
        name for name, parameter in model.named_parameters() if getattr(parameter, _MARK, False)
    )


@holds_streams
@torch.no_grad()
def initialize(
    model: nn.Module,
    names: Iterable[str],
    seed: int,
    after: Callable[[Sequence[str]], None] | None = None,
) -> None:
    """Initialize parameters.

    Args:
        model: the model.
        names: of the parameters, each by its first name.
        seed: of the values.
        after: gets the names of those that a module has set, module by module.
    """
    wanted = set(names)
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = stream_states()
    for path, module in model.named_modules():
        own = {key: one for key, one in module._parameters.items() if one is not None}
        named = {key: f"{path}.{key}".lstrip(".") for key in own}
        if not any(name in wanted for name in named.values()):
            continue
        # The module of a tied parameter's first name sets it; other ranks set their parameters.
        aside = {
            key: one
            for key, one in own.items()
            if named[key] not in wanted or first_names[id(one)] != named[key]
        }
        for key, one in aside.items():
            module._parameters[key] = nn.Parameter(torch.empty_like(one, device="meta"))
        seed_streams(stream_seed(seed, "init", path))
        resets, given = _resets_of(module, path, model), [key for key in own if key not in aside]
        if _own_reset(module) is None:  # the model around may not initialize this one
            for key in given:
                own[key].fill_(math.nan)
        for reset in resets:
            reset()
        module._parameters.update(aside)
        untouched = [named[key] for key in given if own[key].isnan().any()]
        if untouched:
            raise ModelError(
                "A module's initialisation must set all its parameters.",
                received=f"no values for {first_few(untouched)}",
                fix="Give the module a method reset_parameters(self), or pass the model itself.",
            )
        if after is not None:
            after([named[key] for key in given])
    restore_streams(states)


def clear_meta(model: nn.Module) -> None:
    """Mark all parameters as initialized."""
    for parameter in model.parameters():
        if getattr(parameter, _MARK, False):
            delattr(parameter, _MARK)
