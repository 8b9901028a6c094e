"""Files of tensors that lie in stores: all processes of a host write them, each its part.

It is for the time between two calls, when processes have stores in common and no Workers.
"""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from lockstep.checkpoint.partitioned_files import PartitionedFile, TensorPart, write_parts
from lockstep.checkpoint.trees import Tensors
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.launch.workers.helper import HelperContext
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.control import open_region, unpacked
from lockstep.parallel.storage.store import TensorStore
from lockstep.parallel.transfer.serialization import pack
from lockstep.train.checkpointing.partitioned_state import FailedWrite, Found, joined


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What all processes write.

    Attributes:
        files: which are laid out.
        folder: to which their paths are relative.
        stores: of each the layout, and the names of tensors in the files by their number there.
        first_part: the number of this host's first process.
        num_parts: processes of all hosts.
    """

    files: Sequence[PartitionedFile]
    folder: str
    stores: Sequence[tuple[Sequence[TensorSpec], dict[int, str]]]
    first_part: int
    num_parts: int


def write_stored(
    files: Sequence[PartitionedFile],
    folder: str,
    tensors: Tensors,
    stores: Sequence[TensorStore],
    team: Team | None,
    timeout_seconds: float,
    share: tuple[int, int] | None = None,
) -> Found:
    """Write tensors with all processes of this host; those that lie in no store alone.

    Args:
        files: which are laid out for them.
        folder: to which their paths are relative.
        tensors: by their names there.
        stores: in which most lie.
        team: the other processes; None without.
        timeout_seconds: longest wait for one.
        share: the processes of the hosts before, and of all hosts, which call it together; None for
            this host alone.

    Raises:
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
    first_part, num_parts = share or (0, 1 if team is None else team.num_helpers + 1)
    request = _Request(
        files=files,
        folder=folder,
        stores=[(store.specs, own) for store, own in zip(stores, found, strict=True)],
        first_part=first_part,
        num_parts=num_parts,
    )
    if team is not None:
        descriptors = tuple(store.region.descriptor for store in stores)
        team.call(
            _serve,
            pickle.dumps((request, team.first_rank)),
            descriptors,
            position=lambda rank: "writing its part",
            timeout_seconds=timeout_seconds,
        )
    written = [_written(request, stores, 0, () if first_part else others)]
    if team is not None:
        written += [unpacked(*one) for one in team.gather(timeout_seconds)]
        team.finish(timeout_seconds)
    return joined(written)


def _serve(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> None:
    """Another process's part of ``write_stored``."""
    request: _Request
    request, first_rank = pickle.loads(body)
    number = context.rank - first_rank + 1
    answer = pack(_opened_and_written(request, number, descriptors))
    context.send(answer.payload, answer.descriptors)
    answer.close()


def _opened_and_written(request: _Request, number: int, descriptors: Sequence[int]) -> Found:
    stores = [
        TensorStore(specs, open_region(descriptor))
        for (specs, _), descriptor in zip(request.stores, descriptors, strict=True)
    ]
    try:
        return _written(request, stores, number)
    finally:
        for store in stores:
            store.region.close()


def _written(
    request: _Request, stores: Sequence[TensorStore], number: int, others: Sequence[TensorPart] = ()
) -> Found:
    parts = chain(others, _parts(request, stores, request.first_part + number))
    try:
        return write_parts(request.files, parts, request.folder)
    except OSError as error:
        return FailedWrite.of(error)


def _parts(request: _Request, stores: Sequence[TensorStore], number: int) -> Iterator[TensorPart]:
    """One process's parts; it keeps no pages of those before."""
    for store, (_, names) in zip(stores, request.stores, strict=True):
        for index, name in names.items():
            flat = store.views[index].detach().view(-1)
            start, stop = (len(flat) * end // request.num_parts for end in (number, number + 1))
            if start < stop:
                yield TensorPart(name=name, start=start, elements=flat[start:stop])
                store.region.release_pages()
