"""This process's part of a call that runs on all ranks: its Worker, helpers, stores and hosts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import nn

from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.errors import ModelError, WorkerError
from lockstep.formatting import first_few
from lockstep.launch.health.failure import add_note
from lockstep.launch.workers.team import Team
from lockstep.parallel.data_parallel.batch_norm import note_lone_sample
from lockstep.parallel.exchange.control import LeaderControl
from lockstep.parallel.exchange.host_control import HostControl
from lockstep.parallel.parameter_server.async_worker import AsyncWorker
from lockstep.parallel.worker import Worker
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.devices import is_cpu
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.fault_tolerance.rank_states import RankState, fault_summary, states_of
from lockstep.train.multihost.host_channels import HostChannels, bring_groups
from lockstep.train.runtime.assignment import Assignment
from lockstep.train.runtime.helper_watchdog import (
    PARTS_ARE_LOST,
    STATE_AS_SERVERS_HAD_IT,
    STATE_OF_FIRST,
    STATE_OF_SERVERS,
    HelperWatchdog,
    what_is_left,
    what_is_lost,
)
from lockstep.train.runtime.stores import Mapped


@dataclass(frozen=True, kw_only=True)
class RunningCall:
    """This process's part of a call, as the first rank of its host."""

    assignment: Assignment
    team: Team
    worker: Worker
    watch: HelperWatchdog
    stores: Sequence[Mapped]
    region: SharedRegion
    spec: ExchangeSpec
    connected: HostChannels

    @cached_property
    def control(self) -> LeaderControl:
        """The line of this process to the other ranks."""
        team, hosts, watch = self.team, self.connected.hosts, self.watch
        if hosts is None:
            return LeaderControl(team, watch.timeout_seconds)
        return HostControl(
            team,
            hosts.control_group,
            rank=self.worker.rank,
            num_ranks=self.assignment.plan.num_ranks,
            timeout_seconds=watch.timeout_seconds,
            look_around=watch.look_around,
            bring_groups=partial(bring_groups, hosts, self.assignment, self.stores),
        )

    @property
    def is_halted(self) -> bool:
        """True if the ranks were stopped; their board cannot be used again."""
        board = self.worker.board
        return board is not None and board.is_halted

    def states(self) -> list[RankState]:
        """The states of the ranks of this host."""
        return states_of(self.team, self.worker.board, self.worker.rank)

    def close(self) -> None:
        """End the task; before other ranks leave, release pages that would be only here then."""
        for mapped in self.stores:
            if mapped.access == "shared":
                mapped.store.release_pages()
        self.worker.close()

    def look_at_ranks(self, error: BaseException, driver: TaskDriver) -> None:
        """After a failure, while the helpers live: add to the error what the ranks were doing."""
        if self.assignment.plan.pipeline is not None:
            note_lone_sample(error)
        states = self.states()
        if note := fault_summary(states, error):
            add_note(error, note)
        driver.note_failure(error, states, self.team)

    def hold(self, error: BaseException) -> None:
        """After the loss of a process: prevent that ending the others cuts off an update."""
        local = self.worker.local_steps
        if local is not None and isinstance(error, WorkerError) and error.is_loss:
            local.hold_updates()

    def abandon(self, error: BaseException, driver: TaskDriver) -> bool:
        """After a failure, when the helpers have ended: add to the error what is left.

        Returns True if parts of the weights are lost.
        """
        worker = self.worker
        worker.abandon()
        if worker.updater is None:
            return False
        if isinstance(self.assignment.plan.update, AveragedUpdate):
            add_note(error, STATE_OF_FIRST)
            return False
        if isinstance(worker, AsyncWorker):
            stand = worker.progress()
            driver.record_progress(stand)
            if stand is None:
                worker.updater.recover()
            add_note(error, STATE_OF_SERVERS if stand is None else STATE_AS_SERVERS_HAD_IT)
            return False
        assert worker.board is not None
        lost = worker.updater.recover()
        has_older = self._has_older_slots()
        last = worker.board.last_update
        is_lost = worker.mark_lost()
        if last is not None and not lost and not has_older and not is_lost:
            note = what_is_left(last)
        elif (copied := driver.put_back()) is not None:
            is_older = last is None or copied < last
            note = what_is_left(copied, is_put_back=is_older)
        elif is_lost:
            note = PARTS_ARE_LOST
        else:
            note = what_is_lost(last, lost, has_older=has_older)
        add_note(error, note)
        return note == PARTS_ARE_LOST

    def _has_older_slots(self) -> bool:
        """Whether slots are updated in other memory, so that this process has older ones."""
        plan, updater = self.assignment.plan, self.worker.updater
        on_devices = not is_cpu(plan.devices)
        sharding = plan.sharding if plan.pipeline is None else None
        return (
            len(plan.domains) > 1
            and (sharding is None or (on_devices and sharding.offload is None))
            and (on_devices or (updater is not None and bool(updater.slot_keys())))
        )


def check_not_lost(model: nn.Module) -> None:
    """After parts of the weights were lost: check that they have been set again.

    Raises:
        ModelError: they have not.
    """
    lost = [name for name, one in model.named_parameters() if bool(one.isnan().any())]
    if lost:
        raise ModelError(
            "Parts of the weights were lost with other processes when an earlier call failed.",
            received=f"NaN in {first_few(lost)}",
            fix="Load saved weights, or a state, or make the model anew. fit(checkpoint=...) saves "
            "them, and fit(restarts=...) goes on by itself.",
        )
