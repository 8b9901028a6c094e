"""Loads a divided training, or its weights alone, from files: each part is read by its rank.

The script's process sets all else, and leaves the divided tensors without memory. A call of all
ranks follows, in which each reads its parts into its own memory, and checks the hashes of those of
a checkpoint.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lockstep.checkpoint.part_reader import PartReader
from lockstep.checkpoint.reading import DamagedPartError, check_parts
from lockstep.checkpoint.storage import Url, folder_of
from lockstep.checkpoint.trees import Path, pointer
from lockstep.checkpoint.weights import WeightsReader
from lockstep.data.map_style.sources import Source
from lockstep.errors import CheckpointError
from lockstep.events import LOGGER
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.parallel.worker import Worker
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.checkpointing.partitioned_state import divided_names, divides_copies, leaves
from lockstep.train.checkpointing.run_state import state_of
from lockstep.train.checkpointing.training_state import TrainingState, copied
from lockstep.train.fit.tasks import Task
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.runtime.runner import Runner


@dataclass(kw_only=True)
class LoadTask(Task):
    """Every rank reads its parts of a training.

    Attributes:
        source: the training data, for the Plan; None if the Plan needs none.
        place: the folder of the checkpoint, or the file of weights, on this host.
        waiting: names of the checkpoint's tensors that are read.
        weights: names of the parameters in a file of weights; None for a checkpoint.
    """

    name: ClassVar[str] = "resume"
    brings_values: ClassVar[bool] = True
    source: Source | SharedStream | None
    place: str
    waiting: frozenset[str] = frozenset()
    weights: Mapping[str, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "source": None}

    def sources(self) -> list[Any]:
        return []

    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> str:
        """Read; returns the damage that a rank has found, "" if none has."""
        own: tuple[Mapping[str, str] | None, dict[int, str]] = self.weights, {}
        if worker.rank == 0 and self.weights is None:
            own = divided_names(state_of(worker.model, worker.updater), worker)
        parameters, stored = control.broadcast(own)
        worker.begin_loading()
        found = control.gather(self._read(worker, parameters, stored))
        reasons: list[str] = control.broadcast([reason for reason, _ in found if reason])
        worker.show_parameters()  # in any case: an older checkpoint is set into their memory
        if not (reasons or self.weights):
            worker.rebind()  # slots that lie on a device, too
            worker.gather_slots()
        worker.barrier()
        if found:
            read = [num_bytes for _, num_bytes in found]
            LOGGER.info("read: %s, bytes of each rank: %s", self.place, read)
        return reasons[0] if reasons else ""

    def _read(
        self, worker: Worker, parameters: dict[str, str], stored: dict[int, str]
    ) -> tuple[str, int]:
        """Read a rank's parts; returns the damage found, or "", and the number of bytes read."""
        num_bytes = 0
        try:
            with closing(self._opened()) as reader:
                for name, start, memory in worker.kept_parts():
                    reader.read_into(memory, parameters[name], start)
                for number, start, memory in worker.stored_parts():
                    if stored.get(number) in self.waiting:
                        reader.read_into(memory, stored[number], start)
                num_bytes = reader.num_bytes
        except (CheckpointError, OSError) as error:
            return str(error), 0
        return "", num_bytes

    def _opened(self) -> PartReader | WeightsReader:
        return PartReader(self.place) if self.weights is None else WeightsReader(self.place)


@dataclass(frozen=True)
class PartLoading:
    """Loads divided tensors for one ``fit``.

    Attributes:
        runner: trains.
        feed: the training data.
        loss: the training loss.
    """

    runner: Runner
    feed: DataPipeline
    loss: LossAdapter | None

    def prepared(self, place: str, state: TrainingState) -> tuple[TrainingState, frozenset[str]]:
        """A checkpoint's state, its divided tensors without memory; and their names.

        There are none if this process reads all: then all hashes are checked.

        Args:
            place: the checkpoint's folder.
            state: its state.

        Raises:
            DamagedPartError: bytes that this process has read are damaged.
        """
        folder = folder_of(place)
        if isinstance(folder, Url) or not self._is_divided():
            check_parts(folder)
            return state, frozenset()
        parameters = dict(self.runner.model.named_parameters())
        slots: dict[Path, torch.dtype] = {
            ("optimizer", key.parameter, key.slot): key.dtype or parameters[key.parameter].dtype
            for key in self.runner.make_updater().slot_keys()
        }

        def may_wait(path: Path, tensor: torch.Tensor) -> bool:
            own = parameters.get(path[1])
            if own is None or own.shape != tensor.shape or not own.is_contiguous():
                return False
            if path[0] == "parameters":
                return own.requires_grad and own.dtype == tensor.dtype
            return slots.get(path) == tensor.dtype

        with closing(PartReader(place)) as reader:
            found = {name: one for name, one in state.flat()[0].items() if name in reader.tensors}
            named = {pointer(path): (path, one) for path, one in leaves(state)}
            waiting = {name for name in named if name in found and may_wait(*named[name])}
            trained = {name for name, one in parameters.items() if one.requires_grad}
            if not waiting >= {pointer(("parameters", name)) for name in trained}:
                waiting.clear()  # ranks load all parameters or none
            read = {name: reader.whole(name, found[name]) for name in found if name not in waiting}
            known = {
                id(one): one.to("meta") if name in waiting else read.get(name, one)
                for name, (_, one) in named.items()
            }
        return TrainingState(**copied(state.parts(), known=known)), frozenset(waiting)

    def _is_divided(self) -> bool:
        if self.runner.job_context.num_hosts > 1:
            return True
        return divides_copies(self.runner.plan_for(self.feed))

    def load(self, place: str, waiting: frozenset[str]) -> None:
        """Have all ranks read their parts of the tensors that have no memory.

        Raises:
            DamagedPartError: on all hosts, a part is damaged.
        """
        task = LoadTask(source=self.feed.source, place=place, waiting=waiting)
        updater = self.runner.make_updater()
        driver, batch_size = TaskDriver(), self.feed.batch_size
        reason: str = self.runner.run(task, self.loss, updater, driver, batch_size)
        if reason:
            raise DamagedPartError(reason)
