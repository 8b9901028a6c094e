"""Batch sizes that were found before, in a file in the user's cache folder.

A size is valid for one training on one machine: the key is a digest of all that it depends on and
that is known without running anything. A size that is lost costs another search.
"""

import functools
import hashlib
import resource
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from lockstep.cluster.devices import discover, processor_name
from lockstep.cluster.memory_limits import memory_ceiling
from lockstep.data.map_style.sources import Source
from lockstep.data.order import kept_streams
from lockstep.data.trees import map_tensors
from lockstep.disk import CacheFile
from lockstep.parallel.data_parallel.forward import DTYPES


class BatchSizeCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A size that was found.

    Attributes:
        batch_size: samples of the global batch.
        seconds_per_step: with it.
        peak_bytes: the peak memory of all processes together.
        num_samples: of the data in the search, if it had too few for larger batches; else None.
    """

    batch_size: int
    seconds_per_step: float
    peak_bytes: int
    num_samples: int | None


class _Content(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    version: Literal[1]
    sizes: dict[str, BatchSizeCache]


SIZES = CacheFile("batch_sizes.json", _Content, "The batch size that was found")


def recall(key: str) -> BatchSizeCache | None:
    """The size stored under this key, if any."""
    return _known().get(key)


def remember(key: str, found: BatchSizeCache) -> bool:
    """Store a size; returns False if it could not be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ``recall`` has warned about the file
        sizes = {**_known(), key: found}
    return SIZES.write(_Content(version=1, sizes=sizes))


def _known() -> dict[str, BatchSizeCache]:
    content = SIZES.read()
    return {} if content is None else content.sizes


# --- keys ----------------------------------------------------------------------------------------


def key_of(
    *,
    model: nn.Module,
    loss: object,
    optimizer: object,
    source: Source,
    precision: str,
    maker: object,
    options: Iterable[object],
) -> str:
    """A digest of all that a batch size depends on.

    Args:
        model: by the names, classes and shapes in it.
        loss: by its class.
        optimizer: by its class.
        source: by the shapes and dtypes of its first sample.
        precision: of the training.
        maker: of Plans, which follow from it, the model and this machine.
        options: of the training and the search, with a complete ``repr``.
    """
    parts = [
        *_structure(model),
        f"loss {_name_of(loss)}",
        f"optimizer {_name_of(optimizer)}",
        f"sample {_sample_shapes(source, precision)}",
        f"plan {precision} {maker!r}",
        *(f"option {option!r}" for option in options),
        *_machine(),
    ]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _structure(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        yield f"module {path} {_name_of(module)}"
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        yield f"tensor {name} {tuple(value.shape)} {value.dtype} {value.requires_grad}"


def _name_of(thing: object) -> str:
    """The name of a function, or of an object's class."""
    if isinstance(thing, functools.partial):
        return f"partial {_name_of(thing.func)}"
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def _sample_shapes(source: Source, precision: str) -> Any:
    with kept_streams():
        sample = source.read(torch.zeros(1, dtype=torch.long), DTYPES[precision])
    return map_tensors(
        lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
        (sample.inputs, sample.targets, sample.sample_weight),
    )


def _machine() -> Iterator[str]:
    host = discover().hosts[0]
    yield f"processor {processor_name()} {host.num_cores} {torch.get_num_threads()}"
    yield f"devices {[device.kind for device in host.devices if device.kind != 'cpu']}"
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    yield f"memory {memory_ceiling()} {limits}"
    yield f"torch {torch.__version__}"
