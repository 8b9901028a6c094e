"""Snapshots: the state of all ranks after a step, sent to rank 0 for a proof."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lockstep.parallel.debug.module_watch import ModuleWatch, Noted, WatchedSteps
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.worker import Worker
from lockstep.train.callbacks.driver import Snapshot
from lockstep.train.callbacks.rank_sync import RankSync


@dataclass(frozen=True)
class Snapshots:
    """What Snapshots include.

    Attributes:
        look: the steps in which modules' values are noted; None for none.
    """

    look: WatchedSteps | None = None

    def take(self, rank_sync: RankSync, step: int, result: StepResult, noted: Noted) -> None:
        """Give the driver the state after a step; every rank calls it."""
        worker, control = rank_sync.worker, rank_sync.control
        found = worker.gradients() if result.weight else {}
        gradients = {name: None if one is None else one.clone() for name, one in found.items()}
        worker.hold_parameters(everywhere=True)
        own = _state(worker), worker.slots(with_stored=True), gradients, result.weight, noted
        ranks = control.gather(own)
        if control.rank == 0:
            rank_sync.driver.observe_state(
                Snapshot(
                    step=step,
                    loss=result.loss,
                    weight=result.weight,
                    gradients={name: one for rank in ranks for name, one in rank[2].items()},
                    states=[state for state, *_ in ranks[: len(ranks) - worker.plan.num_servers]],
                    slots=[part for _, parts, *_ in ranks for part in parts],
                    is_divided=worker.local_names() is not None,
                    weights=tuple(one[3] for one in ranks)
                    if worker.local_steps is not None
                    else (),
                    num_samples=result.num_samples,
                    noted=[noted for *_, noted in ranks],
                )
            )
        worker.barrier()  # the next step overwrites the gradients

    @contextmanager
    def noting(self, worker: Worker, step: int) -> Iterator[Noted]:
        """Within the block, note what modules compute, if the step is among the watched ones."""
        look = self.look
        if look is None or step not in look.steps:
            yield {}
            return
        is_due = look.flip is not None and (look.flip.rank, look.flip.step) == (worker.rank, step)
        passes = worker.passes
        passes.watch = ModuleWatch(worker.model, look.flip if is_due else None)
        try:
            with passes.watch.watching() as noted:
                yield noted
        finally:
            passes.watch = None


def _state(worker: Worker) -> dict[str, torch.Tensor]:
    """This rank's part of the model's ``state_dict``, a tied tensor under each of its names."""
    own, model = worker.local_names(), worker.model
    tensors = (*model.named_parameters(), *model.named_buffers())
    firsts = {id(tensor): name for name, tensor in tensors}
    elsewhere = set() if own is None else {*firsts.values()} - own
    return {
        name: value.detach().clone()
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)  # a module's extra state may be anything
        and firsts.get(id(value)) not in elsewhere
    }
