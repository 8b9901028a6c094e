"""Describes the contents of an accelerator's memory in out-of-memory errors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep import accelerators
from lockstep.formatting import format_bytes
from lockstep.launch.health.failure import add_note
from lockstep.parallel.worker import Worker


@contextmanager
def noting_shortage(device: torch.device) -> Iterator[None]:
    """Before the first step: add a note to an out-of-memory error in the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        add_note(
            error,
            f"{device} ran out of memory for the tensors that a rank keeps there: the model, its "
            "gradients and the slots of the optimizer. Check which other processes use the "
            "device, or divide the model: lockstep.PipelineStrategy.",
        )
        raise


def shortage_note(worker: Worker) -> str:
    """The rank and device without memory, and the contents of the memory."""
    slots = [] if worker.updater is None else worker.updater.slots(with_stored=True)
    parameters = list(worker.model.parameters())
    held: dict[str, Iterable[Any]] = {
        "parameters": parameters,
        "gradients": [one.grad for one in parameters],
        "slots of the optimizer": [value for part in slots for value in part.slots.values()],
        "buffers": worker.model.buffers(),
    }
    named = ", ".join(f"{format_bytes(_bytes_of(one))} of {name}" for name, one in held.items())
    peak = accelerators.peak_bytes()
    most = "" if peak is None else f", of {format_bytes(peak)} at most"
    return (
        f"Rank {worker.rank} had no memory left on {worker.passes.device}. It held {named}{most}; "
        "the rest is for activations and what is computed. Use a smaller batch, or accumulate=2."
    )


def _bytes_of(values: Iterable[Any]) -> int:
    """Bytes of the tensors that are on an accelerator."""
    return sum(
        value.nbytes
        for value in values
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")
    )
