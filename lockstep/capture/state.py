"""Saves and restores what running a model changes: tensors, attributes, random streams."""

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.capture.layers import FrontEndModel
from lockstep.data.order import restore_streams, stream_states
from lockstep.data.trees import tensors_of


class ModelState:
    """The current state of a model and the random streams.

    It has the values of all parameters, buffers and other tensors of its modules, their attributes,
    the contents of lists, dicts, sets and deques among these, and the states of generators; also
    those of the layers of a front end, and of other objects.

    Args:
        model: the model; a copy of its tensors is kept unless they are on the meta device.
        others: objects beside it, such as losses: modules, or anything with attributes.
        with_trained: keep the values of trained parameters, too: a forward pass writes to others
            (statistics of Keras's layers, averages of weights), but hardly to these. Their
            addresses are always kept: ``module.to(dtype)`` in a forward pass changes them.
    """

    def __init__(self, model: nn.Module, *others: Any, with_trained: bool = True) -> None:
        self._streams = stream_states()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._holders = [(one, dict(vars(one))) for one in _holders(model, *others)]
        self._contents = [
            (held, _contents(held))
            for _, attributes in self._holders
            for held in attributes.values()
            if isinstance(held, dict | list | set | deque)
        ]
        self._generators = [
            (held, held.get_state())
            for _, attributes in self._holders
            for held in attributes.values()
            if isinstance(held, torch.Generator)
        ]
        tensors = {
            id(tensor): tensor
            for tensor in self._tensors()
            if not (tensor.is_meta or tensor.layout != torch.strided)
        }
        self._places = [(tensor, tensor.detach()) for tensor in tensors.values()]
        self._values = [
            (alias, alias.clone())
            for tensor, alias in self._places
            if with_trained or not (isinstance(tensor, nn.Parameter) and tensor.requires_grad)
        ]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for _, attributes in self._holders:
            yield from tensors_of(list(attributes.values()))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for holder, attributes in self._holders:
            if not _is_same(vars(holder), attributes):
                vars(holder).clear()
                vars(holder).update(attributes)
        for held, contents in self._contents:
            if not _is_same(held, contents):
                _refill(held, contents)
        for tensor, alias in self._places:
            if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape:
                tensor.data = alias
        for alias, values in self._values:
            if not torch.equal(alias, values):
                alias.copy_(values)
        for generator, stream in self._generators:
            generator.set_state(stream)
        restore_streams(self._streams)

    def changed_modules(self) -> list[str]:
        """Paths of modules whose attributes, or their contents, have changed."""
        changed = {id(held) for held, contents in self._contents if not _is_same(held, contents)}
        return [
            self._names[id(module)]
            for module, attributes in self._holders
            if id(module) in self._names
            and (
                not _is_same(_own(vars(module)), _own(attributes))
                or any(id(held) in changed for held in attributes.values())
            )
        ]


@contextmanager
def left_alone(model: nn.Module, *others: Any, with_trained: bool = False) -> Iterator[ModelState]:
    """After the block the model, its gradients and the random streams are as they were.

    So are other objects, such as losses. Values of trained parameters are kept on demand: see
    ``ModelState``.

    Yields the state, to be restored in between. Code within it gives no warnings: it is run once
    more outside.
    """
    state = ModelState(model, *others, with_trained=with_trained)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield state
    finally:
        state.restore()
        for parameter, gradient in gradients:
            # It may have been moved to a device meanwhile.
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        torch.clear_autocast_cache()  # it may hold weights that were cast without gradients


def set_mode(model: nn.Module, *, training: bool) -> None:
    """Put a model in the mode in which it is going to run.

    In training, a model that is in training mode keeps its modules' modes: modules that the user
    has put in evaluation mode stay so.
    """
    if not (training and model.training):
        model.train(training)


def _holders(*things: Any) -> list[Any]:
    """The objects with attributes of their own in ``things`` and within them, each once."""
    found: dict[int, Any] = {}
    for thing in things:
        each = [*thing.modules()] if isinstance(thing, nn.Module) else [thing]
        each += [one for model in each if isinstance(model, FrontEndModel) for one in model.held()]
        found |= {id(one): one for one in each if not isinstance(one, type)}
    return [one for one in found.values() if hasattr(one, "__dict__")]


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes without the mode, which is set from outside."""
    return {name: value for name, value in attributes.items() if name != "training"}


def _contents(held: Any) -> Any:
    return dict(held) if isinstance(held, dict) else list(held)


def _is_same(held: Any, contents: Any) -> bool:
    """Whether a container holds the identical objects."""
    if len(held) != len(contents):
        return False
    if isinstance(held, dict):
        return all(
            key is other and value is contents[other]
            for (key, value), other in zip(held.items(), contents, strict=True)
        )
    return all(one is other for one, other in zip(held, contents, strict=True))


def _refill(held: Any, contents: Any) -> None:
    held.clear()
    if isinstance(held, list | deque):
        held.extend(contents)
    else:
        held.update(contents)
