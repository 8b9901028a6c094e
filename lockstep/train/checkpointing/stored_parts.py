"""Files of tensors that lie in stores: all processes of a host write them, each its part.

It is for the time between two calls, when processes have stores in common and no Workers.
"""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from lockstep.checkpoint.parted_files import PartedFile, TensorPart, WrittenSpan, write_parts
from lockstep.checkpoint.trees import Tensors
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.launch.workers.helper import HelperContext
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.control import open_region, unpacked
from lockstep.parallel.storage.store import TensorStore
from lockstep.parallel.transfer.serialization import pack


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What all processes write.

    Attributes:
        files: which are laid out.
        stores: of each the layout, and the names of tensors in the files by their number there.
        num_parts: processes.
    """

    files: Sequence[PartedFile]
    stores: Sequence[tuple[Sequence[TensorSpec], dict[int, str]]]
    num_parts: int


def write_stored(
    files: Sequence[PartedFile],
    tensors: Tensors,
    stores: Sequence[TensorStore],
    team: Team | None,
    timeout_seconds: float,
) -> list[WrittenSpan]:
    """Write tensors with all processes of this host; those that lie in no store alone.

    Args:
        files: which are laid out for them.
        tensors: by their names there.
        stores: in which most lie.
        team: the other processes; None without.
        timeout_seconds: longest wait for one.

    Raises:
        OSError: a file cannot be written.
        WorkerError: a process has ended.
    """
    by_address = {one.data_ptr(): name for name, one in tensors.items()}
    found = [
        {
            number: by_address.pop(view.data_ptr())
            for number, view in enumerate(store.views)
            if view.data_ptr() in by_address
        }
        for store in stores
    ]
    others = [
        TensorPart(name=name, start=0, elements=tensors[name]) for name in by_address.values()
    ]
    num_parts = 1 if team is None else team.num_helpers + 1
    request = _Request(
        files=files,
        stores=[(store.specs, own) for store, own in zip(stores, found, strict=True)],
        num_parts=num_parts,
    )
    if team is not None:
        descriptors = tuple(store.region.descriptor for store in stores)
        team.call(
            _serve,
            pickle.dumps(request),
            descriptors,
            position=lambda rank: "writing its part",
            timeout_seconds=timeout_seconds,
        )
    spans = write_parts(files, chain(others, _parts(request, stores, 0)))
    gathered = [] if team is None else [unpacked(*one) for one in team.gather(timeout_seconds)]
    if team is not None:
        team.finish(timeout_seconds)
    for own in gathered:
        if isinstance(own, OSError):
            raise own
        spans += own
    return spans


def _serve(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> None:
    """Another process's part of ``write_stored``."""
    request: _Request = pickle.loads(body)
    number = context.rank % request.num_parts
    answer = pack(_written(request, number, descriptors))
    context.send(answer.payload, answer.descriptors)
    answer.close()


def _written(
    request: _Request, number: int, descriptors: Sequence[int]
) -> list[WrittenSpan] | OSError:
    stores = [
        TensorStore(specs, open_region(descriptor))
        for (specs, _), descriptor in zip(request.stores, descriptors, strict=True)
    ]
    try:
        return write_parts(request.files, _parts(request, stores, number))
    except OSError as error:
        return error
    finally:
        for store in stores:
            store.region.close()


def _parts(request: _Request, stores: Sequence[TensorStore], number: int) -> Iterator[TensorPart]:
    """One process's parts; it keeps no pages of those before."""
    for store, (_, names) in zip(stores, request.stores, strict=True):
        for index, name in names.items():
            flat = store.views[index].detach().view(-1)
            start, stop = (len(flat) * end // request.num_parts for end in (number, number + 1))
            if start < stop:
                yield TensorPart(name=name, start=start, elements=flat[start:stop])
                store.region.release_pages()
