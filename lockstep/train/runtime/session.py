"""A session: running one task on all ranks of a Plan.

The script's process is rank 0 and computes; helpers are called with everything they need
(``train.runtime.helper_session`` is their side). The script's own objects hold all that lasts
(weights, optimizer, position). Ranks cache what does not change between repeated small calls
(``train.runtime.call_cache``).

On several hosts the script's process of each leads that host's ranks, with a session of its own.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, BinaryIO

from torch import nn

from lockstep.checkpoint import weights
from lockstep.checkpoint.partitioned_files import (
    PartitionedFile,
    can_be_partitioned,
    check_written,
    lay_out,
)
from lockstep.checkpoint.trees import Tensors
from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.data.map_style.sources import ArraySource
from lockstep.errors import WorkerError
from lockstep.events import LOGGER
from lockstep.launch.health.failure import as_raised, noting_on
from lockstep.launch.workers.pool import expect_team, take_team
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.control import SoloControl
from lockstep.parallel.exchange.exchange_layout import exchange_spec
from lockstep.parallel.storage.meta_init import clear_meta
from lockstep.parallel.transfer.serialization import SerializedObject, pack
from lockstep.parallel.worker import Worker
from lockstep.pickling import dumps
from lockstep.plan.decision import LocalUpdate
from lockstep.plan.spec import Plan
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.checkpointing.partitioned_state import FailedWrite, Found
from lockstep.train.checkpointing.stored_parts import write_stored
from lockstep.train.fault_tolerance.rank_states import states_of
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.input.read_limit import ReadLimit
from lockstep.train.multihost.consistency import assignment_facts
from lockstep.train.multihost.followers import call_conclude
from lockstep.train.multihost.host_channels import HostChannels
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.runtime.assignment import (
    Assignment,
    compute_settings,
    initialize_own,
    make_worker,
    run_task,
)
from lockstep.train.runtime.assignment_serialization import (
    check_loss,
    check_number,
    pack_assignment,
)
from lockstep.train.runtime.call_cache import CallCache, CallSignature, CallUpdate, is_cacheable
from lockstep.train.runtime.helper_session import TaskRequest, serve, serve_again
from lockstep.train.runtime.helper_watchdog import HelperWatchdog, Position
from lockstep.train.runtime.running_call import RunningCall, check_not_lost
from lockstep.train.runtime.stores import Mapped, Stores, has_options

_Files = Sequence[PartitionedFile]

# What every helper needs; the template imports it before it forks any helper.
PRELOAD: tuple[str, ...] = ("lockstep.train.runtime.helper_session",)

# Longest wait, after a call that failed early, for followers that have not joined it.
_DISMISSAL_SECONDS = 10.0


class Session:
    """Runs assignments, and keeps the team and the parameter store from one to the next.

    Args:
        timeout_seconds: longest wait of rank 0 for its helpers.

    Attributes:
        preload: modules that helpers import early, besides what all need.
        stores: of the model.
        num_ended: teams that it has ended.
    """

    num_ended = 0
    preload: tuple[str, ...] = ()

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self.stores = Stores()
        self._team: Team | None = None
        self._threads: int | None = None
        self._is_attached = False  # a launcher has started the team's processes
        self._has_met = False  # they have joined the current call
        self._is_called = False  # helpers run a call
        self._are_parts_lost = False  # of the weights, in a call that has failed

    def run(
        self,
        assignment: Assignment,
        driver: TaskDriver,
        hosts: Hosts | None = None,
        calls: CallCache | None = None,
        fingerprint: object = None,
    ) -> Any:
        """Run the task on all ranks; returns the result of this process's part.

        Args:
            assignment: the task, and all that it needs.
            driver: of this process.
            hosts: if the Plan has several, each calls this with its own assignment.
            calls: the cache of earlier calls, and of this one.
            fingerprint: see ``CallSignature``; None to cache nothing.

        Raises:
            ShippingError: a part of the assignment cannot be sent to helpers.
            WorkerError: a helper died or hung.
            HostError: another host failed, or differs from this one.
            BaseException: raised by a rank.
        """
        if not assignment.task.brings_values:
            self.check_whole(assignment.model)
        with compute_settings(assignment.plan):
            if assignment.plan.num_ranks == 1:
                return self._run_alone(assignment, driver)
            if hosts is not None:
                hosts.check_equal(assignment_facts(assignment))
                are_blank, updater = bool(assignment.blank), assignment.updater
                if not assignment.task.brings_values:
                    hosts.share_values(assignment.model, updater, are_blank=are_blank)
            fingerprint = None if hosts is not None else fingerprint
            return self._lead(assignment, driver, hosts, calls or CallCache(), fingerprint)

    def check_whole(self, model: nn.Module) -> None:
        """See ``check_not_lost``."""
        if self._are_parts_lost:
            check_not_lost(model)
            self._are_parts_lost = False

    @property
    def _writing_team(self) -> Team | None:
        """The processes that can write between calls.

        Those that a launcher has started run their own script then, and take no part.
        """
        team = None if self._is_attached else self._team
        return None if team is None or not (team.is_alive and team.answers()) else team

    def write_stored(
        self, files: _Files, folder: str, tensors: Tensors, hosts: Hosts | None = None
    ) -> Found:
        """Between calls: write tensors to files with all processes; see ``stored_parts``.

        Args:
            files: which are laid out.
            folder: to which their paths are relative.
            tensors: by their names in the files.
            hosts: which all call this; None for this host alone.
        """
        team, share = self._writing_team, None
        if hosts is not None:
            counts = hosts.from_all(1 if team is None else team.num_helpers + 1)
            share = sum(counts[: hosts.host]), sum(counts)
        stores = self.stores.all()
        with self._ending_team():
            return write_stored(files, folder, tensors, stores, team, self._timeout, share)

    def write_together(self, tensors: Tensors, metadata: dict[str, str], file: BinaryIO) -> None:
        """Write a file of tensors: between calls with all processes. See ``WriteTensors``."""
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        can_all = all(map(can_be_partitioned, tensors.values())) and os.path.exists(path)
        if self._team is None or self._is_called or not can_all:
            weights.write_tensors(tensors, metadata, file, self.stores.release_pages)
            return
        laid_out = lay_out(path, tensors, metadata, is_hashed=False)
        file.write(laid_out.header)
        file.flush()
        file.truncate(laid_out.size)
        found = self.write_stored([laid_out], "", tensors)
        if isinstance(found, FailedWrite):
            raise found.error()
        check_written(laid_out, found)

    def dismiss(self, hosts: Hosts, result: Any, model: nn.Module) -> None:
        """Send a call's result and the weights to the processes that follow this one."""
        team = self._team or self._meet_followers(hosts, hosts.first_rank + 1, self._timeout)
        call_conclude(team, result, model, self._timeout)

    def desert(self, hosts: Hosts, error: BaseException) -> None:
        """After a call that has failed: end it for the processes that follow this one.

        They would take the next call for this one.
        """
        if not self._has_met:
            patience = min(_DISMISSAL_SECONDS, self._timeout)
            with suppress(WorkerError):  # they have not joined: the call failed there, too
                self._meet_followers(hosts, hosts.first_rank + 1, patience)
        self.close(error)
        self._has_met = False

    def _meet_followers(self, hosts: Hosts, first_rank: int, timeout_seconds: float) -> Team:
        """Meet the processes that follow this one, the first of which has this rank."""
        self._team = hosts.attach_team(first_rank, timeout_seconds)
        self._is_attached = self._has_met = True
        return self._team

    def _run_alone(self, assignment: Assignment, driver: TaskDriver) -> Any:
        spec = exchange_spec(assignment)
        self.stores.adopt_alone(assignment)
        is_alone = isinstance(assignment.plan.update, LocalUpdate)
        region = None if is_alone else spec.create()
        worker = make_worker(assignment, spec, region, rank=0, look_around=lambda waited: None)
        _stop_on_interrupt(driver, worker)
        if isinstance(assignment.task, FitTask):
            look = partial(states_of, None, None, 0)
            driver.begin_run(assignment.task.start, look)
        clear_meta(assignment.model)
        try:
            return run_task(assignment, worker, SoloControl(), driver)
        finally:
            worker.hold_own()

    def _lead(
        self,
        assignment: Assignment,
        driver: TaskDriver,
        hosts: Hosts | None,
        calls: CallCache,
        fingerprint: object,
    ) -> Any:
        """Run the task with this host's ranks; this process is the first."""
        # Before any process starts: raises if something cannot be sent or memory is lacking.
        here = assignment.plan.ranks_of_host(0 if hosts is None else hosts.host)
        if self._team is None and len(here) > 1 and not (hosts is not None and hosts.has_followers):
            expect_team(assignment.plan.threads_per_device, self._preload)
        if not self.stores:
            driver.announce("Moving the model to shared memory")
        stores = self.stores.adopt_all(assignment, here.start)
        name = assignment.task.name
        signature = CallSignature.of(assignment, fingerprint, [mapped.store for mapped in stores])
        part: RunningCall | None = calls.find(name, signature)
        if part is not None and part.team is self._team and part.team.answers():
            keeps = True
            result = self._conduct(part, driver, partial(self._recall, part, assignment))
        else:
            spec = exchange_spec(assignment)
            check_loss(assignment)
            keeps = calls.is_repeated(name, signature) and is_cacheable(assignment, spec)
            own = [one.store for one in stores if one.in_place_of is None]
            with closing(pack_assignment(assignment, own)) as serialized:
                part = self._prepared(assignment, driver, hosts, stores, spec, here)
                call = partial(self._call, part, serialized, keeps=keeps)
                result = self._conduct(part, driver, call)
        calls.keep(name, signature, part if keeps and not part.is_halted else None)
        return result

    def _prepared(
        self,
        assignment: Assignment,
        driver: TaskDriver,
        hosts: Hosts | None,
        stores: Sequence[Mapped],
        spec: ExchangeSpec,
        here: range,
    ) -> RunningCall:
        """This process's part of a call, with the ranks that it leads."""
        with self._ending_team():
            region = spec.create(here)
            team = self._take_team(assignment.plan, here, hosts, driver.announce)
            watch = HelperWatchdog(team, self._timeout, hosts)
            connected = HostChannels.of(hosts, assignment.plan, assignment.groups, self._timeout)
            mirrored = stores[-1].store.views[:1] if has_options(assignment) else []
            worker = make_worker(
                assignment,
                spec,
                region,
                rank=here.start,
                look_around=watch.look_around,
                neighbours=connected.neighbours(here.start, mirrored, watch.look_around),
                meeting=connected.connections.meeting,
            )
            watch.watch(worker.board)
        return RunningCall(
            assignment=assignment,
            team=team,
            worker=worker,
            watch=watch,
            stores=stores,
            region=region,
            spec=spec,
            connected=connected,
        )

    @contextmanager
    def _ending_team(
        self, part: RunningCall | None = None, driver: TaskDriver | None = None
    ) -> Iterator[None]:
        """If a call fails within the block, end the helpers and add what is left to the error."""
        try:
            yield
        except BaseException as trouble:
            error = as_raised(trouble)
            if part is not None and driver is not None:
                with noting_on(error):
                    part.look_at_ranks(error, driver)
                with noting_on(error):
                    part.hold(error)
            with noting_on(error):
                self.close(error)
            if part is not None and driver is not None:
                with noting_on(error):
                    self._are_parts_lost = part.abandon(error, driver)
            if error is trouble:
                raise
            raise error from error.__cause__

    def _conduct(self, part: RunningCall, driver: TaskDriver, call: Callable[[], None]) -> Any:
        """Call the helpers, and do this process's part of the task."""
        assignment, worker, team = part.assignment, part.worker, part.team
        with self._ending_team(part, driver), self._in_call():
            call()
            _stop_on_interrupt(driver, worker)
            initialize_own(assignment, worker)
            clear_meta(assignment.model)
            limit = worker.passes.reading = ReadLimit(self._timeout, team.raise_slow_read)
            # Arrays in memory are read at once.
            may_hang = not all(isinstance(one, ArraySource) for one in assignment.task.sources())
            if isinstance(assignment.task, FitTask):
                driver.begin_run(assignment.task.start, part.states)
            with limit.watched() if may_hang else nullcontext():
                result = run_task(assignment, worker, part.control, driver)
            part.close()
            team.finish(self._timeout)
            part.control.bring_groups()
            _stop_on_interrupt(TaskDriver(), worker)  # a cached call must not refer to its driver
        return result

    @contextmanager
    def _in_call(self) -> Iterator[None]:
        self._is_called = True
        try:
            yield
        finally:
            self._is_called = False

    def _take_team(
        self, plan: Plan, here: range, hosts: Hosts | None, announce: Callable[[str], None]
    ) -> Team:
        """The other ranks of this host: the last team, if it fits."""
        num_helpers, first_rank = len(here) - 1, here.start + 1
        if self._team is not None and not (
            (self._team.num_helpers, self._team.first_rank) == (num_helpers, first_rank)
            and (
                self._team.is_alive
                if self._is_attached
                else self._threads == plan.threads_per_device and self._team.answers()
            )
        ):
            pids = self._team.known_pids()
            for rank, how in self._team.ended().items():
                text = "rank %d (process %d) ended between calls: %s"
                LOGGER.warning(text, rank, pids[rank], how)
            self.close()
        if self._team is not None:
            return self._team
        if hosts is not None and hosts.has_followers:
            hosts.check_devices(len(here))
            return self._meet_followers(hosts, first_rank, self._timeout)
        self._is_attached, self._threads = False, plan.threads_per_device
        announce(f"Starting {num_helpers} helper{'s' if num_helpers > 1 else ''}")
        self._team = take_team(num_helpers, self._threads, self._preload, first_rank=first_rank)
        return self._team

    def _call(self, part: RunningCall, serialized: SerializedObject, *, keeps: bool) -> None:
        """Send the helpers their parts."""
        assignment, connected = part.assignment, part.connected
        here = assignment.plan.ranks_of_host(connected.connections.host)
        call = TaskRequest(
            name=assignment.task.name,
            num_groups=len(assignment.groups),
            stores=[
                (one.ranks_among(here), one.store.specs, one.access, one.in_place_of)
                for one in part.stores
            ],
            has_options=has_options(assignment),
            spec=part.spec,
            payload=serialized.payload,
            connections=connected.connections,
            keeps=keeps,
            devices=assignment.plan.devices,
        )
        regions = [part.region, *(one.store.region for one in part.stores)]
        descriptors = [*(each.descriptor for each in regions), *connected.descriptors]
        check_number(len(descriptors) + len(serialized.descriptors))
        # The call may hold the script's own classes, of a model's outputs.
        self._send(part, serve, dumps(call), (*descriptors, *serialized.descriptors))

    def _recall(self, part: RunningCall, assignment: Assignment) -> None:
        """Send the helpers the changes to a call that they have cached."""
        update = CallUpdate.of(assignment, part.assignment)
        with closing(pack(update)) as serialized:
            part.assignment.task.renew(update.changes)
            self._send(part, serve_again, serialized.payload, serialized.descriptors)

    def _send(
        self,
        part: RunningCall,
        function: Callable[..., object],
        body: bytes,
        descriptors: tuple[int, ...],
    ) -> None:
        part.team.call(
            function,
            body,
            descriptors,
            position=Position(part.assignment.task, part.worker.board),
            timeout_seconds=self._timeout,
        )

    def close(self, error: BaseException | None = None) -> None:
        """End the helpers; those with their own script get the error."""
        team, self._team = self._team, None
        self.num_ended += team is not None
        if team is not None and error is not None and self._is_attached:
            team.send_failure(error)
        if team is not None:
            team.close()

    @property
    def _preload(self) -> tuple[str, ...]:
        return PRELOAD + self.preload


def _stop_on_interrupt(driver: TaskDriver, worker: Worker) -> None:
    """On Ctrl-C, have all ranks stop together."""
    if worker.board is not None:
        worker.board.wants_halt = lambda: driver.is_interrupted
