"""Every rank proves that it computes what rank 0 computes, before the first step.

A helper has a copy of the model, and modules that it has imported itself: a function that the
script has replaced, a hook on all modules, a registry that a constructor has filled may be missing
there. So all ranks run a few samples forward and backward, the same on each, with the same random
numbers. Of every layer's output, of the loss, and of the gradients of outputs and of small
parameters a fingerprint is taken. They must be the same bits on all ranks of a host; the first that
is not is named. The model and the random streams are left as they were.

Gradients of large weights are not formed: their memory would be taken twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.capture.layers import FrontEndModel
from lockstep.capture.state import left_alone
from lockstep.data.order import kept_streams, seed_streams
from lockstep.data.sources import Batch, Source
from lockstep.data.trees import tensors_of
from lockstep.errors import ModelError
from lockstep.parallel.control import Control
from lockstep.parallel.forward import DTYPES
from lockstep.parallel.losses import JointLoss, ShareLoss
from lockstep.parallel.serialization import describe
from lockstep.parallel.settings import TorchSettings
from lockstep.parallel.worker import Worker
from lockstep.train.likeness import digest

# Samples of a proof, and elements of the largest parameter whose gradient is compared.
_NUM_SAMPLES = 2
_MOST_ELEMENTS = 1 << 14

# What was computed, and its fingerprint.
Print = tuple[str, bytes]


def samples_of(source: Source | None, precision: str) -> Any:
    """A few samples, for ``prove_alike`` on rank 0; None where another host reads them."""
    if source is None:
        return None
    with kept_streams():
        batch = source.read(torch.arange(min(_NUM_SAMPLES, len(source))), DTYPES[precision])
    return batch.inputs, batch.targets, batch.sample_weight, batch.num_samples


def standing(sight: object, parts: tuple[Any, ...], model: nn.Module) -> object:
    """What a proof holds for: equal as long as model, functions and settings are the same.

    Args:
        sight: what the front end sees them as; None where it does not see all.
        parts: the model, the loss and the user's functions.
        model: the model.
    """
    seen = sight
    if sight is None:
        try:
            seen = hash(describe(parts, list(model.parameters())))
        except Exception:  # whatever pickling raises; what cannot be sent is an error later
            seen = object()
    functions = [id(one) for space in (torch, F, torch.Tensor) for one in vars(space).values()]
    if isinstance(model, FrontEndModel):
        functions += map(id, model.functions())
    forwards = (id(kind.forward) for kind in {type(module) for module in model.modules()})
    modes = torch._C._len_torch_function_stack()
    return seen, TorchSettings.current(), modes, hash((*functions, *forwards))


def prove_alike(worker: Worker, control: Control, samples: Any) -> None:
    """Compare what all ranks compute; every rank calls it, in training mode.

    Args:
        worker: of this rank, which holds the whole model.
        control: its line to the others.
        samples: on rank 0, a few of the data, as (inputs, targets, weights, number).

    Raises:
        ModelError: on rank 0; a rank computes something else than the first of its host.
    """
    inputs, targets, sample_weight, num_samples = control.broadcast(samples)
    batch = Batch(
        inputs=inputs, targets=targets, sample_weight=sample_weight, num_samples=num_samples
    )
    with left_alone(worker.model, *worker.passes.user_losses()):
        own = _fingerprints(worker.model, lambda: worker.passes.losses_alone(batch))
    told = control.gather(own)
    for host in range(worker.plan.num_hosts) if told else ():
        first, *others = worker.plan.ranks_of_host(host)
        for rank in others:
            if (place := _first_difference(told[first], told[rank])) is not None:
                raise _unlike(rank, first, place)


def _fingerprints(
    model: nn.Module, run: Callable[[], Sequence[ShareLoss | JointLoss]]
) -> list[Print]:
    """Of all that is computed, in its order, as far as it goes: errors are the first step's."""
    found: list[Print] = []
    outputs: list[tuple[str, torch.Tensor]] = []
    seed_streams(0)
    try:
        with _watching(model, found, outputs):
            losses = run()
        found += [("the loss", digest(_values(losses)))]
        found += _gradients(model, losses, outputs)
    except Exception:  # whatever a model raises, or a reentrant checkpoint in backward
        return found
    return found


@contextmanager
def _watching(
    model: nn.Module, found: list[Print], outputs: list[tuple[str, torch.Tensor]]
) -> Iterator[None]:
    """Within the block layers' outputs are noted: their fingerprints, and where gradients go."""

    def note(place: str, output: Any) -> None:
        tensors = list(tensors_of(output))
        found.append((f"the output of {place}", digest(tensors)))
        outputs.extend((place, one) for one in tensors if one.requires_grad)

    def note_module(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        note(_place(name, module), output)

    if isinstance(model, FrontEndModel):
        with model.watching(note):
            yield
        return
    handles = [
        module.register_forward_hook(partial(note_module, name))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _place(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"layer {name!r} ({kind})" if name else f"the model ({kind})"


def _values(losses: Sequence[ShareLoss | JointLoss]) -> list[torch.Tensor]:
    return [value for loss in losses for value in loss.values]


def _gradients(
    model: nn.Module,
    losses: Sequence[ShareLoss | JointLoss],
    outputs: Sequence[tuple[str, torch.Tensor]],
) -> list[Print]:
    """Of what was computed last first, as backward goes."""
    small = [
        (f"parameter {name!r}", parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel() <= _MOST_ELEMENTS
    ]
    places = [*reversed(outputs), *small]
    roots = [value.sum() for value in _values(losses) if value.requires_grad]
    if not roots or not places:
        return []
    found = torch.autograd.grad(roots, [one for _, one in places], allow_unused=True)
    return [
        (f"the gradient of {place}", b"" if gradient is None else digest([gradient]))
        for (place, _), gradient in zip(places, found, strict=True)
    ]


def _first_difference(one: Sequence[Print], other: Sequence[Print]) -> str | None:
    for own, theirs in zip(one, other, strict=False):
        if own != theirs:
            return own[0] if own[0] == theirs[0] else f"{own[0]}, where it has {theirs[0]}"
    return None


def _unlike(rank: int, first: int, place: str) -> ModelError:
    return ModelError(
        f"Rank {rank} does not compute what rank {first} computes.",
        received=f"other bits, first in {place}",
        fix="A helper has a copy of the model and imports modules for itself. What the script "
        "has changed in an imported module (a function, a class, a global, a mode, a hook on "
        "all modules) is not there: do it in the model's own code, where it is used.",
    )
