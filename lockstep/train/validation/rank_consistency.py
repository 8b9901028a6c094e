"""Every rank proves that it computes what rank 0 computes, before the first step.

A helper has a copy of the model, and modules that it has imported itself: a function that the
script has replaced, a hook on all modules, a registry that a constructor has filled may be missing
there. So all ranks run a few samples forward and backward, the same on each, with the same random
numbers. Of every layer's output, of the loss, and of the gradients of outputs and of small
parameters a fingerprint is taken. They must be the same bits on all cores of a host; the first that
is not is named. Hosts may have other processors, which round in other ways, and kernels of
accelerators may add in another order each time: there, sizes of what layers return are compared, of
hosts those on their first ranks. What torch.compile has compiled is run as it was
before, since compiling takes long. The model and the random streams are left as they were.

Gradients of large weights are not formed: their memory would be taken twice.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.capture.calls import uncompiled
from lockstep.capture.layers import FrontEndModel, functions_of
from lockstep.capture.seeding import gradients_of
from lockstep.capture.state import left_alone
from lockstep.data.map_style.sources import Batch, Source
from lockstep.data.order import kept_streams, seed_streams
from lockstep.data.trees import tensors_of
from lockstep.errors import ModelError
from lockstep.parallel.data_parallel.forward import DTYPES
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.loss.share_losses import JointLoss, ShareLoss
from lockstep.parallel.settings import TorchSettings
from lockstep.parallel.transfer.serialization import describe
from lockstep.parallel.worker import Worker
from lockstep.plan.devices import is_cpu
from lockstep.train.resume.stable_descriptions import digest

# Samples of a proof, and elements of the largest parameter whose gradient is compared.
_NUM_SAMPLES = 2
MOST_ELEMENTS = 1 << 14

# How far apart sizes may be on two hosts: much more than rounding, even in 16 bits.
_HOSTS_APART = 0.02

GRADIENT = "the gradient of"
LOSS = "the loss"


# What was computed, its fingerprint, and its size; hosts send them to each other.
Print = tuple[str, bytes, float]


def samples_of(source: Source | None, precision: str) -> Any:
    """A few samples, for ``check_ranks_agree`` on rank 0; None where another host reads them."""
    if source is None:
        return None
    with kept_streams():
        batch = source.read(torch.arange(min(_NUM_SAMPLES, len(source))), DTYPES[precision])
    return batch.inputs, batch.targets, batch.sample_weight, batch.num_samples


def proof_key(sight: object, parts: tuple[Any, ...], model: nn.Module) -> object:
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
    modes = torch._C._len_torch_function_stack()
    return seen, TorchSettings.current(), modes, functions_of(model)


def check_ranks_agree(worker: Worker, control: Control, samples: Any) -> None:
    """Compare what all ranks compute; every rank calls it, in training mode.

    Args:
        worker: of this rank, which holds the whole model.
        control: its line to the others.
        samples: on rank 0, a few of the data, as (inputs, targets, weights, number).

    Raises:
        ModelError: on rank 0; a rank computes something else than the first of its host, or that
            than rank 0.
    """
    inputs, targets, sample_weight, num_samples = control.broadcast(samples)
    batch = Batch(
        inputs=inputs, targets=targets, sample_weight=sample_weight, num_samples=num_samples
    )
    with left_alone(worker.model, *worker.passes.user_losses()), uncompiled():
        own = _fingerprints(worker.model, lambda: worker.passes.losses_alone(batch))
    told = control.gather(own)
    is_exact = is_cpu(worker.plan.devices)
    for host in range(worker.plan.num_hosts) if told else ():
        first, *others = worker.plan.ranks_of_host(host)
        for rank in others:
            place = first_difference(told[first], told[rank], is_same if is_exact else is_like)
            if place is not None:
                raise unlike(rank, first, place, is_exact=is_exact)
    for host in range(1, worker.plan.num_hosts) if told else ():
        first = worker.plan.ranks_of_host(host)[0]
        if (place := first_difference(told[0], told[first], is_like)) is not None:
            raise unlike(first, 0, place, is_exact=False)


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
        found.append(print_of(LOSS, values_of(losses)))
        found += _gradients(model, losses, outputs)
    except Exception:  # whatever a model raises
        return found
    return found


@contextmanager
def _watching(
    model: nn.Module, found: list[Print], outputs: list[tuple[str, torch.Tensor]]
) -> Iterator[None]:
    """Within the block layers' outputs are noted: their fingerprints, and where gradients go."""

    def note(place: str, output: Any) -> None:
        tensors = list(tensors_of(output))
        found.append(print_of(f"the output of {place}", tensors))
        outputs.extend((place, one) for one in tensors if one.requires_grad)

    def note_module(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        note(place_of(name, module), output)

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


def place_of(name: str, module: nn.Module) -> str:
    """What users know a module by."""
    kind = type(module).__name__
    return f"layer {name!r} ({kind})" if name else f"the model ({kind})"


def values_of(losses: Sequence[ShareLoss | JointLoss]) -> list[torch.Tensor]:
    """What backward starts from."""
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
        if parameter.requires_grad and parameter.numel() <= MOST_ELEMENTS
    ]
    places = [*reversed(outputs), *small]
    roots = [value.sum() for value in values_of(losses) if value.requires_grad]
    if not roots or not places:
        return []
    found = gradients_of(roots, [one for _, one in places], [*model.parameters()])
    return [
        print_of(f"{GRADIENT} {place}", [] if gradient is None else [gradient])
        for (place, _), gradient in zip(places, found, strict=True)
    ]


def print_of(place: str, tensors: Sequence[torch.Tensor]) -> Print:
    """The fingerprint of what was computed."""
    norms = [float(one.detach().double().norm()) for one in tensors if not one.is_complex()]
    return place, digest(tensors), math.hypot(*norms)


def is_same(one: Print, other: Print) -> bool:
    """Whether a rank of the same host has computed the same."""
    return one[:2] == other[:2]


def is_like(one: Print, other: Print) -> bool:
    """Whether another host or an accelerator has computed the same, but for rounding."""
    (place, _, size), (_, _, other_size) = one, other
    is_gradient = place.startswith(GRADIENT)  # through BatchNorm, of few samples, all is rounding
    is_finite = math.isfinite(size) and math.isfinite(other_size)
    close = math.isclose(size, other_size, rel_tol=_HOSTS_APART, abs_tol=_HOSTS_APART)
    return is_gradient or not is_finite or close


def first_difference(
    one: Sequence[Print],
    other: Sequence[Print],
    is_like: Callable[[Print, Print], bool] = is_same,
) -> str | None:
    """The first place of which they have other prints.

    A model that loops over a set calls layers in an order that each process has for itself: of a
    place, the prints are compared in any order. A rank that has failed on its way has fewer.
    """
    own, theirs = _by_place(one), _by_place(other)
    has_failed = LOSS not in own or LOSS not in theirs
    for place in {**own, **theirs}:
        ours, others = own.get(place, []), theirs.get(place, [])
        if len(ours) != len(others):
            if not has_failed:
                return place
        elif not all(map(is_like, ours, others)):
            return place
    return None


def _by_place(prints: Sequence[Print]) -> dict[str, list[Print]]:
    found: dict[str, list[Print]] = defaultdict(list)
    for one in sorted(prints, key=lambda one: (one[2] if math.isfinite(one[2]) else -1, one[1])):
        found[one[0]].append(one)
    return {place: found[place] for place, *_ in prints}


def unlike(rank: int, first: int, place: str, *, is_exact: bool = True) -> ModelError:
    """The error of a rank that computes something else than another."""
    return ModelError(
        f"Rank {rank} does not compute what rank {first} computes.",
        received=f"{'other bits' if is_exact else 'something else'}, first in {place}",
        fix="A helper has a copy of the model and imports modules for itself. What the script "
        "has changed in an imported module (a function, a class, a global, a mode, a hook on "
        "all modules) is not there: do it in the model's own code, where it is used.",
    )
