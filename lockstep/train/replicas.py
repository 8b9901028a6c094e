"""What each of the replicas that train apart has of its own, to go on from in another process.

It is taken where their weights are alike. What then differs is the state of their optimizers, and
what they have made of an epoch so far.
"""

from collections.abc import Sequence

import torch

from lockstep.checkpoint.trees import Tree
from lockstep.parallel.control import Control
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.worker import Worker
from lockstep.train.epoch_sums import told
from lockstep.train.training_state import TrainingState, copied


def replicas_of(worker: Worker, results: Sequence[StepResult], control: Control) -> Tree:
    """A tree for each rank, on rank 0; all ranks call it.

    Args:
        worker: this rank's.
        results: of its steps in the epoch so far.
        control: its line to the others.
    """
    own = {"steps": told(results), "buffers": _flags(worker)}
    if worker.rank != 0:  # the first one's is the training's
        assert worker.updater is not None
        own["updater"] = worker.updater.state()
    gathered = control.gather(own)
    return copied(gathered) if control.rank == 0 else None


def own_replica(replicas: Tree, worker: Worker) -> Tree:
    """A rank's part of what ``replicas_of`` has told; None where that is of other replicas."""
    if not worker.has_own_optimizer or replicas is None or len(replicas) != worker.plan.num_ranks:
        return None
    return replicas[worker.rank]


def set_replica(worker: Worker, replica: Tree) -> None:
    """Have a rank go on as one that has told this of itself."""
    flags = _flags(worker)
    for name, value in replica["buffers"].items():
        flags[name].copy_(value)
    if "updater" in replica:
        assert worker.updater is not None
        worker.updater.load_state(TrainingState(**replica["updater"]))


def _flags(worker: Worker) -> dict[str, torch.Tensor]:
    """Buffers that are not averaged."""
    return {name: one for name, one in worker.model.named_buffers() if one.dtype == torch.bool}
