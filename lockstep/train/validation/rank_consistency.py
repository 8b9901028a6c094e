"""Checks before the first step that every rank computes what rank 0 computes.

A helper has a copy of the model, and modules that it has imported itself: a function that the
script has replaced, a hook on all modules, a registry that a constructor has filled may be missing
there. So all ranks run the same few samples forward and backward, with the same random numbers, and
take fingerprints of every layer's output, of the loss, and of the gradients of outputs and of small
parameters. On CPUs of one host all must have the same bits; the error names the first difference.
Hosts may have other processors, which round differently, and kernels of accelerators may sum in
another order each time: there, norms of the layers' outputs are compared, and between hosts those
of their first ranks. Compiled functions are run uncompiled, since compiling takes long. The model
and the random streams are not changed.

Gradients of large weights are not computed: they would need memory a second time.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

# Samples of a check, and elements of the largest parameter whose gradient is compared.
_NUM_SAMPLES = 2
MOST_ELEMENTS = 1 << 14

# Tolerance for norms on two hosts: much more than rounding, even in 16 bits.
_TOLERANCE = 0.02

GRADIENT = "the gradient of"
LOSS = "the loss"


# The place of a value, its fingerprint, and its norm; hosts send them to each other.
Print = tuple[str, bytes, float]


def samples_of(source: Source | None, precision: str) -> Any:
    """A few samples, for ``check_ranks_agree`` on rank 0; None if another host reads them."""
    if source is None:
        return None
    with kept_streams():
        batch = source.read(torch.arange(min(_NUM_SAMPLES, len(source))), DTYPES[precision])
    return batch.inputs, batch.targets, batch.sample_weight, batch.num_samples


def proof_key(sight: object, parts: tuple[Any, ...], model: nn.Module) -> object:
    """A key that is equal while model, functions and settings are the same, so no check is needed.

    Args:
        sight: the front end's fingerprint of them; None if it does not cover all.
        parts: the model, the loss and the user's functions.
        model: the model.
    """
    seen = sight
    if sight is None:
        try:
            seen = hash(describe(parts, list(model.parameters())))
        except Exception:  # pickling may raise any; sending the object will raise it again
            seen = object()
    modes = torch._C._len_torch_function_stack()
    return seen, TorchSettings.current(), modes, functions_of(model)


def batch_of(samples: Any) -> Batch:
    """The batch of ``samples_of``."""
    inputs, targets, weight, number = samples
    return Batch(inputs=inputs, targets=targets, sample_weight=weight, num_samples=number)


def check_ranks_agree(worker: Worker, control: Control, samples: Any) -> None:
    """Compare what all ranks compute; every rank calls it, in training mode.

    Args:
        worker: of this rank, which holds the whole model.
        control: its line to the others.
        samples: on rank 0, a few of the data, as (inputs, targets, weights, number).

    Raises:
        ModelError: on rank 0; a rank differs from the first of its host, or that from rank 0.
    """
    batch = batch_of(control.broadcast(samples))
    state = left_alone(worker.model, *worker.passes.user_losses())
    with worker.in_trial(), state, uncompiled(), empty_memory_filled():
        own = _fingerprints(worker.model, lambda: worker.passes.losses_alone(batch))
    by_rank = control.gather(own)
    is_exact = is_cpu(worker.plan.devices)
    for host in range(worker.plan.num_hosts) if by_rank else ():
        first, *others = worker.plan.ranks_of_host(host)
        for rank in others:
            match = is_same if is_exact else is_like
            place = first_difference(by_rank[first], by_rank[rank], match)
            if place is not None:
                raise unlike(rank, first, place, is_exact=is_exact)
    for host in range(1, worker.plan.num_hosts) if by_rank else ():
        first = worker.plan.ranks_of_host(host)[0]
        if (place := first_difference(by_rank[0], by_rank[first], is_like)) is not None:
            raise unlike(first, 0, place, is_exact=False)


@contextmanager
def empty_memory_filled() -> Iterator[None]:
    """Within the block ``torch.empty`` and its kind have the same values on all ranks: NaN."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(max(mode, 1))
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _fingerprints(
    model: nn.Module, run: Callable[[], Sequence[ShareLoss | JointLoss]]
) -> list[Print]:
    """The fingerprints of all values in order, up to an error, which the first step will raise."""
    found: list[Print] = []
    outputs: list[tuple[str, torch.Tensor]] = []
    seed_streams(0)
    try:
        with _watching(model, found, outputs):
            losses = run()
        found.append(print_of(LOSS, values_of(losses)))
        found += _gradients(model, losses, outputs)
    except Exception:  # a model may raise any
        return found
    return found


@contextmanager
def _watching(
    model: nn.Module, found: list[Print], outputs: list[tuple[str, torch.Tensor]]
) -> Iterator[None]:
    """Within the block note layers' outputs: their fingerprints, and tensors with gradients."""

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
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(note_module, name)).remove)
        yield


def place_of(name: str, module: nn.Module) -> str:
    """A description of a module for users."""
    kind = type(module).__name__
    return f"layer {name!r} ({kind})" if name else f"the model ({kind})"


def values_of(losses: Sequence[ShareLoss | JointLoss]) -> list[torch.Tensor]:
    """The values from which backward starts."""
    return [value for loss in losses for value in loss.values]


def _gradients(
    model: nn.Module,
    losses: Sequence[ShareLoss | JointLoss],
    outputs: Sequence[tuple[str, torch.Tensor]],
) -> list[Print]:
    """Fingerprints of gradients, the last output's first, in the order of backward."""
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
    return gradient_prints(places, found)


def gradient_prints(
    places: Sequence[tuple[str, torch.Tensor]], found: Sequence[torch.Tensor | None]
) -> list[Print]:
    """The fingerprints of the gradients at some places."""
    return [
        print_of(f"{GRADIENT} {place}", [] if gradient is None else [gradient])
        for (place, _), gradient in zip(places, found, strict=True)
    ]


def print_of(place: str, tensors: Sequence[torch.Tensor]) -> Print:
    """The fingerprint of a place's tensors."""
    norms = [float(one.detach().double().norm()) for one in tensors if not one.is_complex()]
    return place, digest(tensors), math.hypot(*norms)


def is_same(one: Print, other: Print) -> bool:
    """True if two fingerprints have the same bits."""
    return one[:2] == other[:2]


def is_like(one: Print, other: Print) -> bool:
    """True if two fingerprints have the same norms but for rounding."""
    (place, _, norm), (_, _, other_norm) = one, other
    # A gradient through BatchNorm of few samples can be rounding errors only.
    is_gradient = place.startswith(GRADIENT)
    is_finite = math.isfinite(norm) and math.isfinite(other_norm)
    close = math.isclose(norm, other_norm, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return is_gradient or not is_finite or close


def first_difference(
    one: Sequence[Print], other: Sequence[Print], is_like: Callable[[Print, Print], bool] = is_same
) -> str | None:
    """The first place with different prints; None if there is none.

    A model that loops over a set calls layers in another order in each process: so the prints of a
    place are compared in any order. A rank that has failed has fewer.
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
    """The error for a rank that differs from another."""
    return ModelError(
        f"Rank {rank} does not compute what rank {first} computes.",
        received=f"{'other bits' if is_exact else 'something else'}, first in {place}",
        fix="A helper has a copy of the model and imports modules itself, without the script's "
        "changes to imported modules (a function, a class, a global, a mode, a hook on all "
        "modules): make these changes in the model's own code, where they are used.",
    )
