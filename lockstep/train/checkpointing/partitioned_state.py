"""Copies of a divided training, which ranks write together: each the parts that it updates.

A training is divided if its ranks divide parameters, gradients or slots, or the model's layers.

Rank 0 finds the tensors that ranks divide, and lays out files for them: of a checkpoint, or in
memory of no process, which outlives each rank (``Target``). All ranks write there between two
steps, right from where they train, so no rank has memory for a copy. Rank 0 alone has the rest of
the state: numbers, buffers, and what is small.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.checkpoint.partitioned_files import (
    PartitionedFile,
    TensorPart,
    WrittenSpan,
    can_be_partitioned,
    check_written,
    lay_out,
    write_parts,
)
from lockstep.checkpoint.storage import PARTED_PATH
from lockstep.checkpoint.trees import Path, Tensors, Tree, pointer
from lockstep.checkpoint.weights import mapped_tensors
from lockstep.cluster.anonymous_files import anonymous_file
from lockstep.comm.shared_memory.file_region import unnamed_file
from lockstep.errors import HostError
from lockstep.parallel.worker import Worker
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.spec import Plan
from lockstep.train.checkpointing.training_state import TrainingState, copied


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """What rank 0 asks all ranks to write.

    Attributes:
        files: which rank 0 has laid out.
        folder: to which their paths are relative, on rank 0's host.
        parameters: names of divided parameters; of each, that of its tensor in the files.
        stored: the same for tensors in the updater's store, by their number there.
    """

    files: Sequence[PartitionedFile]
    folder: str
    parameters: Mapping[str, str]
    stored: Mapping[int, str]


@dataclass(frozen=True)
class FailedWrite:
    """Why a rank could not write: an OSError's parts, which are sent between hosts."""

    number: int
    reason: str
    path: str

    @classmethod
    def of(cls, error: OSError) -> "FailedWrite":
        return cls(error.errno or 0, error.strerror or str(error), str(error.filename or ""))

    def error(self) -> OSError:
        """The error."""
        return OSError(self.number, self.reason, self.path)


Found = list[WrittenSpan] | FailedWrite
"""What a rank has written."""


def joined(found: Sequence[Found]) -> Found:
    """What several processes have written; the failure of one if one has failed."""
    failed = next((own for own in found if isinstance(own, FailedWrite)), None)
    return failed or [span for own in found if not isinstance(own, FailedWrite) for span in own]


Write = Callable[[Sequence[PartitionedFile], str, Tensors], Found]
"""Writes tensors, given by name, to files that are laid out for them in a folder."""


class Target(Protocol):
    """Files for the tensors that ranks divide."""

    folder: str

    @property
    def files(self) -> Sequence[PartitionedFile]:
        """Laid out; their paths may be relative to ``folder``."""

    def finish(self, spans: Sequence[WrittenSpan]) -> Tensors:
        """The tensors, when all ranks have written."""

    def give_up(self, error: BaseException) -> None:
        """A rank could not write."""


class MemoryTarget:
    """Memory that outlives every rank but this process: an anonymous file.

    Args:
        tensors: of these forms.
        directory: of the file; None for one in memory.
    """

    folder = ""

    def __init__(self, tensors: Tensors, directory: str | None = None) -> None:
        if directory is None:
            self._descriptor = anonymous_file("lockstep: copy")
        else:
            self._descriptor = unnamed_file(directory)
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.files = [lay_out(path, tensors, {}, is_hashed=False)]
        os.pwrite(self._descriptor, self.files[0].header, 0)
        os.truncate(self._descriptor, self.files[0].size)

    def finish(self, spans: Sequence[WrittenSpan]) -> Tensors:
        """See ``Target``; their memory is freed with them."""
        check_written(self.files[0], spans)
        tensors = mapped_tensors(self.files[0].path)
        os.close(self._descriptor)
        return tensors

    def give_up(self, error: BaseException) -> None:
        os.close(self._descriptor)


class PartitionedCopy:
    """A copy of a training, as rank 0 makes it.

    Args:
        state: the present one.
        take: gets the copy, its memory apart, when all ranks have written.
        make_target: makes the files for divided tensors, given by name.
    """

    def __init__(
        self,
        state: TrainingState,
        make_target: Callable[[Tensors], Target],
        take: Callable[[TrainingState], None],
    ) -> None:
        self._state = state
        self._make_target = make_target
        self._take = take
        self._tensors: Tensors = {}
        self._target: Target | None = None

    def begin(self, worker: Worker) -> WriteRequest:
        """Lay out the files for what ranks divide."""
        parameters, numbers = divided_names(self._state, worker)
        divided = {*parameters.values(), *numbers.values()}
        self._tensors = {
            pointer(path): one for path, one in leaves(self._state) if pointer(path) in divided
        }
        self._target = self._make_target(self._tensors)
        return WriteRequest(
            files=self._target.files,
            folder=self._target.folder,
            parameters=parameters,
            stored=numbers,
        )

    def write_all(self, write: Write) -> None:
        """Write a copy of a training of which the script's model and optimizer have all.

        Args:
            write: see above.
        """
        self._tensors = whole_tensors(self._state)
        self._target = self._make_target(self._tensors)
        self.end([write(self._target.files, self._target.folder, self._tensors)])

    def end(self, found: Sequence[Found]) -> None:
        """All ranks have written, or could not.

        Raises:
            OSError: that of a rank; there is no copy then.
        """
        spans = joined(found)
        if isinstance(spans, FailedWrite):
            self.give_up(spans.error())
            raise spans.error()
        assert self._target is not None
        written = self._target.finish(spans)
        known = {id(one): written[name] for name, one in self._tensors.items()}
        self._take(TrainingState(**copied(self._state.parts(), known=known)))

    def give_up(self, error: BaseException) -> None:
        """There will be no copy: remove what has been written."""
        if self._target is not None:
            self._target.give_up(error)


def write_requested(worker: Worker, request: WriteRequest, folder: str) -> Found:
    """Write a rank's parts.

    Args:
        worker: of the rank.
        request: of rank 0.
        folder: of this host; "" if there is one host.
    """
    if folder:
        check_paths(request.files)
    try:
        return write_parts(request.files, _parts(worker, request), folder or request.folder)
    except OSError as error:
        return FailedWrite.of(error)


def divided_names(state: TrainingState, worker: Worker) -> tuple[dict[str, str], dict[int, str]]:
    """The tensors of a state that ranks divide.

    Returns:
        Their names in files, by the parameter's name; and by the number of the stored slot.
    """
    trained, updater = {*state.trained}, worker.updater
    places = [] if updater is None else [place for _, place in updater.stored()]
    stored = {place.data_ptr(): number for number, place in enumerate(places)}
    parameters: dict[str, str] = {}
    numbers: dict[int, str] = {}
    for path, tensor in leaves(state):
        if path[0] == "parameters" and path[1] in trained:
            parameters[path[1]] = pointer(path)
        elif path[0] != "parameters" and tensor.data_ptr() in stored:
            numbers[stored[tensor.data_ptr()]] = pointer(path)
    return parameters, numbers


def check_paths(files: Sequence[PartitionedFile]) -> None:
    """Check that files that host 0 has named lie in the folder of checkpoints.

    Raises:
        HostError: they do not.
    """
    strange = [one.path for one in files if not PARTED_PATH.fullmatch(one.path)]
    if strange:
        raise HostError(
            "Host 0 must name files of a checkpoint.",
            received=repr(strange[0]),
            fix="Run the same version of Lockstep on all hosts.",
        )


def whole_tensors(state: TrainingState) -> Tensors:
    """The tensors of a whole training that processes write together, by name."""
    return {pointer(path): tensor for path, tensor in leaves(state)}


def divides_copies(plan: Plan) -> bool:
    """True if ranks can write copies of a training together."""
    if plan.pipeline is not None and plan.num_ranks > 1:
        return plan.num_hosts == 1 and not isinstance(plan.update, AveragedUpdate)
    if plan.sharding is None:
        return False
    return plan.num_ranks > 1 or plan.sharding.offload is not None


def may_divide_copies(maker: Maker, num_hosts: int) -> bool:
    """True if ranks of a maker's Plans can write copies together, unless there is one rank."""
    traits = maker.traits
    return traits.divides_state or (traits.has_stages and num_hosts == 1)


def keeps_parts(plan: Plan) -> bool:
    """True if between steps a rank has, or changes, only its part of the parameters."""
    sharding = plan.sharding
    if sharding is None or plan.pipeline is not None or plan.num_ranks == 1:
        return False
    return sharding.divides_parameters or sharding.shares_parameters


def _parts(worker: Worker, request: WriteRequest) -> Iterator[TensorPart]:
    pieces = worker.pieces
    for bound in pieces:
        if bound.name in request.parameters:
            name = request.parameters[bound.name]
            yield TensorPart(name=name, start=bound.piece.start, elements=bound.tensor.detach())
    for number, start, elements in worker.stored_parts():
        if number in request.stored:
            yield TensorPart(name=request.stored[number], start=start, elements=elements)


def leaves(state: TrainingState) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of a state that processes can write together, and the keys that lead to them."""
    return ((path, one) for path, one in _tensors_in(state.parts()) if can_be_partitioned(one))


def _tensors_in(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors in dicts, and the keys that lead to them."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, one in tree.items():
            yield from _tensors_in(one, (*path, str(key)))
