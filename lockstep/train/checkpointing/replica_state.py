"""The states of local SGD's replicas, which each have an optimizer of their own, for checkpoints.

They are taken after the weights were averaged. What then differs between replicas is the state of
their optimizers, and their sums of losses and metrics in the epoch.
"""

from collections.abc import Sequence

import torch

from lockstep.checkpoint.trees import Tree
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.updater_interface import Slots, assemble_slots
from lockstep.parallel.worker import Worker
from lockstep.train.checkpointing.training_state import TrainingState, copied
from lockstep.train.fit.epoch_sums import steps_as_tree
from lockstep.train.optim.wrapped_updaters import OuterUpdater


def replicas_of(worker: Worker, results: Sequence[StepResult], control: Control) -> Tree:
    """A tree for each rank, on rank 0; all ranks call it.

    Args:
        worker: this rank's.
        results: of its steps in the epoch so far.
        control: its line to the others.
    """
    assert worker.updater is not None
    own = {"steps": steps_as_tree(results), "buffers": _flags(worker)}
    size = worker.plan.ranks_per_replica
    pieces = worker.updater.slots() if size > 1 else []  # a stage's part of the optimizer
    if worker.rank >= size == 1:  # the first replica's is in the training's state
        own["updater"] = worker.updater.state()
    gathered = control.gather((own, pieces))
    if control.rank != 0:
        return None
    if size > 1:
        parameters = dict(worker.model.named_parameters())
        options = worker.updater.state()["options"]  # callbacks set them on rank 0, for all
        for first in range(size, len(gathered), size):
            ranks = gathered[first : first + size]
            slots = assemble_slots([one for _, part in ranks for one in part], parameters)
            parts = _parts_of(slots)
            for each, _ in ranks:
                each["updater"] = {"options": options, **parts}
    return copied([each for each, _ in gathered])


def _parts_of(slots: dict[str, Slots]) -> dict[str, Tree]:
    """The parts of a state that consist of the slots of all stages of a pipeline."""
    names = [name for name, own in slots.items() if OuterUpdater.slot in own]
    return {
        "velocities": {name: slots[name].pop(OuterUpdater.slot) for name in names},
        "optimizer": {name: own for name, own in slots.items() if own},
    }


def own_replica(replicas: Tree, worker: Worker) -> Tree:
    """A rank's part of ``replicas_of``; None if the division into replicas was another."""
    plan, local = worker.plan, worker.local_steps
    if local is None or not local.has_own_optimizer:
        return None
    if replicas is None or len(replicas) != plan.num_ranks:
        return None
    is_alike = sum("updater" not in one for one in replicas) == plan.ranks_per_replica
    return replicas[worker.rank] if is_alike else None


def set_replica(worker: Worker, replica: Tree) -> None:
    """Set a rank to its part of ``replicas_of``."""
    flags = _flags(worker)
    for name, value in replica["buffers"].items():
        flags[name].copy_(value)
    if "updater" in replica:
        assert worker.updater is not None
        worker.updater.load_state(TrainingState(**replica["updater"]))
        worker.rebind()


def _flags(worker: Worker) -> dict[str, torch.Tensor]:
    """Buffers that are not averaged."""
    return {name: one for name, one in worker.model.named_buffers() if one.dtype == torch.bool}
