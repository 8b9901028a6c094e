"""A session: running one task on all ranks of a Plan.

The script's process is rank 0 and computes; helpers are called with everything they need
(``train.serving`` is their side). All that lasts (weights, optimizer, position) lies in the
script's own objects. Of a small call that is made again and again, ranks keep what is the same
each time (``train.standing``).

On several hosts the script's process of each leads that host's ranks, with a session of its own.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lockstep.channel.channel import Channel
from lockstep.comm.board import Board
from lockstep.comm.exchange import ExchangeSpec
from lockstep.comm.shared_memory import SharedRegion
from lockstep.errors import OptionError, WorkerError, problem
from lockstep.launch.failure import add_note, as_raised
from lockstep.launch.link import MOST_DESCRIPTORS
from lockstep.launch.pool import expect_team, give_back, take_team
from lockstep.launch.team import Team
from lockstep.parallel.blank import forget_blanks
from lockstep.parallel.build import WireKey, exchange_spec, wire_keys
from lockstep.parallel.control import LeaderControl, SoloControl
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.host_control import HostControl
from lockstep.parallel.parcel import Parcel, pack, parameters_in
from lockstep.parallel.shipping import pack_named
from lockstep.parallel.store import ParameterStore, TensorStore, check_separate, slot_spec
from lockstep.parallel.worker import Worker
from lockstep.pickling import dumps
from lockstep.plan.spec import LocalUpdate, Plan
from lockstep.train.assignment import Assignment, compute_settings, initialize_own, make_worker
from lockstep.train.conductor import Conductor
from lockstep.train.followers import call_conclude
from lockstep.train.hosts import Hosts
from lockstep.train.likeness import assignment_facts
from lockstep.train.read_limit import ReadLimit
from lockstep.train.serving import Abroad, Call, serve, serve_again
from lockstep.train.standing import Footing, News, StandingCalls, may_stand
from lockstep.train.tasks import Task
from lockstep.units import first_few

# What every helper needs; the template imports it before any helper is born.
PRELOAD: tuple[str, ...] = ("lockstep.train.serving",)

# A rank that waits for other hosts hears after this time of a failure on its own.
_PATIENCE_SECONDS = 1.0
# With other hosts, rank 0 waits so much longer than its helpers do.
_HEAD_START_SECONDS = 5.0
# Longest wait, after a call that has failed early, for followers that are still to come to it.
_DISMISSAL_SECONDS = 10.0


class Session:
    """Runs assignments, and keeps the team and the parameter store from one to the next.

    Args:
        timeout_seconds: longest wait of rank 0 for its helpers.

    Attributes:
        preload: modules that helpers should have imported, beside what all need.
    """

    preload: tuple[str, ...] = ()

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._stores: list[ParameterStore] = []  # one per group of parameters
        self._slots: list[TensorStore] = []
        self._slots_owner: Callable[[], object] = lambda: None
        self._team: Team | None = None
        self._threads: int | None = None
        self._is_attached = False  # the team is of processes that a launcher has started
        self._has_met = False  # they have come to the call under way

    def run(
        self,
        assignment: Assignment,
        conductor: Conductor,
        hosts: Hosts | None = None,
        calls: StandingCalls | None = None,
        sight: object = None,
    ) -> Any:
        """Do the task on all ranks; returns what this process's part returns.

        Args:
            assignment: the task, and all that it needs.
            conductor: of this process.
            hosts: where the Plan has several, each calls this with an assignment of its own.
            calls: what is kept of earlier calls, and of this one.
            sight: see ``Footing``; None where nothing is to be kept.

        Raises:
            ShippingError: a part of the assignment cannot be sent to helpers.
            WorkerError: a helper died or hung.
            HostError: another host failed, or is not what this one is.
            BaseException: what a rank has raised, whichever it is.
        """
        with compute_settings(assignment.plan):
            if assignment.plan.num_ranks == 1:
                return self._run_alone(assignment, conductor)
            if hosts is not None:
                hosts.check_equal(assignment_facts(assignment))
                hosts.share_values(assignment.model, assignment.updater)
            sight = None if hosts is not None else sight
            return self._lead(assignment, conductor, hosts, calls or StandingCalls(), sight)

    def dismiss(self, result: Any, model: nn.Module) -> None:
        """Let the processes that follow this one go on, with a call's result and the weights."""
        if self._team is not None:
            call_conclude(self._team, result, model, self._timeout)

    def desert(self, hosts: Hosts, error: BaseException) -> None:
        """After a call that has failed: end it for the processes that follow this one, too.

        In it they would take the next call for this one.
        """
        if not self._has_met:
            patience = min(_DISMISSAL_SECONDS, self._timeout)
            with suppress(WorkerError):  # they have not come: it has failed there, too
                self._team = hosts.attach_team(hosts.place.num_processes - 1, 1, patience)
                self._is_attached = True
        self.close(error)
        self._has_met = False

    def _run_alone(self, assignment: Assignment, conductor: Conductor) -> Any:
        spec = _spec(assignment)
        if assignment.updater is not None:
            _options_store(assignment)
        is_alone = isinstance(assignment.plan.update, LocalUpdate)
        region = None if is_alone else spec.create()
        worker = make_worker(assignment, spec, region, rank=0, look_around=lambda waited: None)
        _heed(conductor, worker)
        return assignment.task.run(worker, SoloControl(), conductor)

    def _lead(
        self,
        assignment: Assignment,
        conductor: Conductor,
        hosts: Hosts | None,
        calls: StandingCalls,
        sight: object,
    ) -> Any:
        """Do the task with this host's ranks, of which this process is the first."""
        # Before any process starts: what cannot be sent, or finds no memory, shows here.
        here = assignment.plan.ranks_of_host(0 if hosts is None else hosts.host)
        if self._team is None and len(here) > 1 and not (hosts is not None and hosts.has_followers):
            expect_team(assignment.plan.threads_per_device, self._preload)
        if not self._stores:
            conductor.announce("Moving the model to shared memory")
        stores = self._adopt_all(assignment, here.start)
        name = assignment.task.name
        footing = Footing.of(assignment, sight, [store for _, store in stores])
        part: _Part | None = calls.find(name, footing)
        if part is not None and part.team is self._team and part.team.answers():
            keeps = True
            result = self._conduct(part, conductor, partial(self._recall, part, assignment))
        else:
            spec = _spec(assignment)
            _check_loss(assignment)
            keeps = calls.is_repeated(name, footing) and may_stand(assignment, spec)
            with closing(_pack(assignment, [store for _, store in stores])) as parcel:
                part = self._prepared(assignment, conductor, hosts, stores, spec, here)
                call = partial(self._call, part, parcel, keeps=keeps)
                result = self._conduct(part, conductor, call)
        calls.keep(name, footing, part if keeps and not part.is_halted else None)
        return result

    def _prepared(
        self,
        assignment: Assignment,
        conductor: Conductor,
        hosts: Hosts | None,
        stores: "Sequence[_Store]",
        spec: ExchangeSpec,
        here: range,
    ) -> "_Part":
        """This process's part of a call, and all ranks that it leads."""
        with self._ending_team():
            region = spec.create(here)
            team = self._take_team(assignment.plan, here, hosts, conductor.announce)
            watch = _Watch(team, self._timeout, here.start, hosts)
            wired = _Wired.of(hosts, assignment, self._timeout)
            worker = _leading_worker(assignment, spec, region, watch, stores, wired)
            watch.watch(worker.board)
        return _Part(
            assignment=assignment,
            team=team,
            worker=worker,
            control=_control(team, assignment.plan, self._timeout, watch, hosts),
            stores=stores,
            region=region,
            spec=spec,
            wired=wired,
        )

    @contextmanager
    def _ending_team(self, part: "_Part | None" = None) -> Iterator[None]:
        """A call that fails within the block ends the helpers, and says what it leaves."""
        try:
            yield
        except BaseException as trouble:
            error = as_raised(trouble)
            self.close(error)
            if part is not None:
                part.abandon(error)
            if error is trouble:
                raise
            raise error from error.__cause__

    def _conduct(self, part: "_Part", conductor: Conductor, call: Callable[[], None]) -> Any:
        """Call the helpers, and do this process's part of the task."""
        assignment, worker, team = part.assignment, part.worker, part.team
        with self._ending_team(part):
            call()
            _heed(conductor, worker)
            initialize_own(assignment, worker)
            forget_blanks(assignment.model)
            limit = worker.passes.reading = ReadLimit(self._timeout, team.raise_slow_read)
            with limit.watched():
                result = assignment.task.run(worker, part.control, conductor)
            worker.close()
            team.finish(self._timeout)
            if part.wired is not None:
                _bring_groups(part.wired, assignment, part.stores)
            _heed(Conductor(), worker)  # what is kept of a call must not know who conducted it
        return result

    def _adopt_all(self, assignment: Assignment, leader: int) -> "list[_Store]":
        """The stores of parameters, then of slots, then of options.

        Args:
            assignment: what they are for.
            leader: this process's rank.
        """
        ranks = [group.ranks for group in assignment.groups]
        stores: list[_Store] = [*zip(ranks, self._adopt(assignment, leader), strict=True)]
        if assignment.updater is not None:
            stores += zip(ranks, self._adopt_slots(assignment, leader), strict=True)
            stores += _options_store(assignment)
        return stores

    def _adopt(self, assignment: Assignment, leader: int) -> Sequence[ParameterStore]:
        """Have the parameters of each group lie in a store of theirs."""
        model, groups = assignment.model, assignment.groups
        members = _members(model, groups)
        if not (
            len(self._stores) == len(members)
            and all(
                store.region.is_shared and store.fits(own)
                for store, own in zip(self._stores, members, strict=True)
            )
        ):
            check_separate(model.named_parameters(), model.named_buffers())
            self._stores = [
                ParameterStore.adopt(
                    own,
                    are_blank=bool(assignment.blank),
                    is_reserved=_is_reserved(assignment, group, leader),
                )
                for own, group in zip(members, groups, strict=True)
            ]
        for store, own, group in zip(self._stores, members, groups, strict=True):
            store.readopt(own)
            store.is_elsewhere = leader not in group.ranks
        self.release_pages()
        return self._stores

    def _adopt_slots(self, assignment: Assignment, leader: int) -> list[TensorStore]:
        updater = assignment.updater
        assert updater is not None
        parameters = dict(assignment.model.named_parameters())
        all_keys = updater.slot_keys()
        keys = [
            [key for key in all_keys if key.parameter in group.names] for group in assignment.groups
        ]
        specs = [tuple(slot_spec(key, parameters[key.parameter]) for key in own) for own in keys]
        if not (
            [store.specs for store in self._slots] == specs
            and all(store.region.is_shared for store in self._slots)
            and self._slots_owner() is updater.owner
        ):
            self._slots = [
                TensorStore.create(own, is_reserved=_is_reserved(assignment, group, leader))
                for own, group in zip(specs, assignment.groups, strict=True)
            ]
            self._slots_owner = weakref.ref(updater.owner)
        updater.store_slots(
            {
                key: view
                for own, store in zip(keys, self._slots, strict=True)
                for key, view in zip(own, store.views, strict=True)
            }
        )
        for slots, group in zip(self._slots, assignment.groups, strict=True):
            slots.is_elsewhere = leader not in group.ranks
        self.release_pages()
        return self._slots

    def readopt(self, model: nn.Module) -> None:
        """Bring parameters that a callback moved back into their stores."""
        parameters = dict(model.named_parameters())
        for store in self._stores:
            store.readopt([(spec.name, parameters[spec.name]) for spec in store.specs])

    def release_pages(self) -> None:
        """Keep no page here of what other ranks alone have."""
        for store in (*self._stores, *self._slots):
            if store.is_elsewhere:
                store.region.release_pages()

    def _take_team(
        self, plan: Plan, here: range, hosts: Hosts | None, announce: Callable[[str], None]
    ) -> Team:
        """The other ranks of this host: the same as before, if they fit."""
        num_helpers, first_rank = len(here) - 1, here.start + 1
        if self._team is not None and not (
            (self._team.num_helpers, self._team.first_rank) == (num_helpers, first_rank)
            and self._threads == plan.threads_per_device
            and (self._team.is_alive if self._is_attached else self._team.answers())
        ):
            self.close()
        if self._team is None:
            self._threads = plan.threads_per_device
            self._is_attached = hosts is not None and hosts.has_followers
            if hosts is not None and hosts.has_followers:
                self._team = hosts.attach_team(num_helpers, first_rank, self._timeout)
                self._has_met = True
            else:
                announce(f"Starting {num_helpers} helper{'s' if num_helpers > 1 else ''}")
                self._team = take_team(
                    num_helpers, self._threads, self._preload, first_rank=first_rank
                )
        return self._team

    def _call(self, part: "_Part", parcel: Parcel, *, keeps: bool) -> None:
        """Send the helpers their parts."""
        assignment, wired = part.assignment, part.wired
        call = Call(
            name=assignment.task.name,
            num_groups=len(assignment.groups),
            stores=[(ranks, store.specs) for ranks, store in part.stores],
            has_options=_has_options(assignment),
            spec=part.spec,
            payload=parcel.payload,
            abroad=None if wired is None else wired.abroad,
            keeps=keeps,
        )
        regions = [part.region, *(store.region for _, store in part.stores)]
        descriptors = [each.descriptor for each in regions]
        if wired is not None:
            descriptors += [end.fileno() for end in wired.channels.values()]
        _check_number(len(descriptors) + len(parcel.descriptors))
        # The call may hold classes of the script's own: those of a model's outputs.
        self._send(part, serve, dumps(call), (*descriptors, *parcel.descriptors))

    def _recall(self, part: "_Part", assignment: Assignment) -> None:
        """Send the helpers what is new in a call whose like they have kept."""
        with closing(pack(News.of(assignment))) as parcel:
            part.assignment.task.renew(assignment.task.fields())
            self._send(part, serve_again, parcel.payload, parcel.descriptors)

    def _send(
        self,
        part: "_Part",
        function: Callable[..., bytes],
        body: bytes,
        descriptors: tuple[int, ...],
    ) -> None:
        part.team.call(
            function,
            body,
            descriptors,
            position=_Position(part.assignment.task, part.worker.board),
            timeout_seconds=self._timeout,
        )

    def close(self, error: BaseException | None = None) -> None:
        """End the helpers; those that go on with a script of their own are told of the error."""
        team, self._team = self._team, None
        if team is not None and error is not None and self._is_attached:
            team.tell_failure(error)
        if team is not None:
            team.close()

    def release(self) -> None:
        """Done for good: hand the helpers on, or end them."""
        team, self._team = self._team, None
        if team is not None and self._is_attached:
            team.close()
        elif team is not None:
            team.forget()
            give_back(team, self._threads, self._preload)

    @property
    def _preload(self) -> tuple[str, ...]:
        return PRELOAD + self.preload


# A store, and the ranks that map it.
_Store = tuple[tuple[int, ...], TensorStore]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """This process's part of a call, as the first rank of its host."""

    assignment: Assignment
    team: Team
    worker: Worker
    control: LeaderControl
    stores: Sequence[_Store]
    region: SharedRegion
    spec: ExchangeSpec
    wired: "_Wired | None"

    @property
    def is_halted(self) -> bool:
        """Whether the ranks were told to stop: for good, as far as their board is concerned."""
        board = self.worker.board
        return board is not None and board.is_halted

    def abandon(self, error: BaseException) -> None:
        """The call has failed, and the helpers have ended: note in the error what is left."""
        worker = self.worker
        worker.abandon()
        if worker.updater is not None:
            lost = worker.updater.recover()
            has_older = self.assignment.plan.num_hosts > 1 and bool(worker.updater.slot_keys())
            add_note(error, _state_of_training(worker.board, lost, has_older=has_older))


@dataclass(frozen=True, kw_only=True)
class _Wired:
    """Other hosts, with wires to them.

    Attributes:
        hosts: all hosts.
        abroad: what this host's ranks are told of them.
        channels: this host's wires, by the ranks at this end and at the other, and by their use.
    """

    hosts: Hosts
    abroad: Abroad
    channels: Mapping[WireKey, Channel]

    @classmethod
    def of(
        cls, hosts: Hosts | None, assignment: Assignment, timeout_seconds: float
    ) -> "_Wired | None":
        """Have the wires that a Plan needs, if it has several hosts."""
        plan, groups = assignment.plan, assignment.groups
        if hosts is None or plan.num_hosts == 1:
            return None
        channels = hosts.open_wires(plan, wire_keys(plan, groups), timeout_seconds)
        names = {rank: hosts.names[plan.host_of(rank)] for rank in range(plan.num_ranks)}
        abroad = Abroad(
            host=hosts.host,
            names=names,
            wires={key: channel.keys for key, channel in channels.items()},
            timeout_seconds=timeout_seconds,
        )
        return cls(hosts=hosts, abroad=abroad, channels=channels)


def _bring_groups(wired: _Wired, assignment: Assignment, stores: Sequence[_Store]) -> None:
    """Have every host know the parameters and slots that it has no rank for."""
    plan = assignment.plan
    for ranks, store in stores:
        having = {plan.host_of(rank) for rank in ranks}
        if len(having) < plan.num_hosts:
            is_here = wired.hosts.host in having
            wired.hosts.bring(store.region, min(having), is_here=is_here)


def _leading_worker(
    assignment: Assignment,
    spec: ExchangeSpec,
    region: SharedRegion,
    watch: "_Watch",
    stores: Sequence[_Store],
    wired: _Wired | None,
) -> Worker:
    """The worker of this process, the first of its host."""
    neighbours = None
    if wired is not None:
        mirrored = [stores[-1][1].views[0]] if _has_options(assignment) else []
        crossing = wired.hosts.crossing(watch.look_around)
        own = [end for (rank, _, _), end in wired.channels.items() if rank == watch.first_rank]
        neighbours = wired.abroad.neighbours(watch.first_rank, own, mirrored, crossing)
    return make_worker(
        assignment,
        spec,
        region,
        rank=watch.first_rank,
        look_around=watch.look_around,
        neighbours=neighbours,
    )


def _control(
    team: Team, plan: Plan, timeout_seconds: float, watch: "_Watch", hosts: Hosts | None
) -> LeaderControl:
    if hosts is None or plan.num_hosts == 1:
        return LeaderControl(team, timeout_seconds)
    return HostControl(
        team,
        hosts.circle,
        rank=watch.first_rank,
        num_ranks=plan.num_ranks,
        timeout_seconds=timeout_seconds,
        look_around=watch.look_around,
    )


def _heed(conductor: Conductor, worker: Worker) -> None:
    """Have all ranks stop together when the user wants rank 0 to."""
    if worker.board is not None:
        worker.board.wants_halt = lambda: conductor.is_interrupted


def _state_of_training(board: Board | None, lost: list[str], *, has_older: bool) -> str:
    """For whoever goes on after an error: what the helpers have left, now that they have ended.

    Args:
        board: this host's.
        lost: parameters whose slots are lost.
        has_older: other hosts have slots, of which there are older ones here.
    """
    assert board is not None
    last = board.last_update
    if last is None:
        return (
            "The weights were being updated: some slices are one step ahead of the others. "
            "Load weights that were saved before you go on."
        )
    if last < 0:
        return "The weights are whole, as fit has found them."
    whole = f"The weights are whole, as step {last} has left them"
    if has_older:
        return (
            f"{whole}. Of the optimizer's slots those that other hosts update are older: load a "
            "state that was saved, or make a new optimizer."
        )
    whole += ", and so is the optimizer"
    return f"{whole}, but for the slots of {', '.join(lost)}: lost." if lost else f"{whole}."


class _Watch:
    """What rank 0 looks after while it waits at the board."""

    def __init__(
        self, team: Team, timeout_seconds: float, first_rank: int, hosts: Hosts | None
    ) -> None:
        self.first_rank = first_rank
        self._team = team
        self._timeout = timeout_seconds
        self._hosts = hosts
        self._board: Callable[[], Board | None] = lambda: None

    def watch(self, board: Board | None) -> None:
        """Say where waiting takes place."""
        if board is not None:
            # The board knows this object. A cycle would keep its memory until the collector runs.
            self._board = weakref.ref(board)

    def look_around(self, waited_seconds: float) -> None:
        """Raise if waiting on is in vain."""
        self._team.look_around(partial(self._is_awaited, waited_seconds))
        if self._hosts is not None:
            self._hosts.look_around(waited_seconds)
            if self._hosts.circle.awaited:
                return  # time is up when they say so
        # A helper that waits for another host says which one, so its time has to be up first.
        margin = 0.0 if self._hosts is None else _HEAD_START_SECONDS
        if waited_seconds > self._timeout + margin:
            self._team.raise_timeout(waited_seconds)

    def _is_awaited(self, waited_seconds: float, rank: int) -> bool:
        board = self._board()
        if board is None:
            return False
        if board.is_waiting:
            return board.is_awaited(rank)
        # At a wire or a courier it waits for other hosts, and they may wait for any rank of this
        # one. Not at once: rank 0 may be about to fail of the same, by itself.
        return waited_seconds > _PATIENCE_SECONDS


class _Position:
    """Where ranks are, for messages."""

    def __init__(self, task: Task, board: Board | None) -> None:
        self._name = task.name
        self._board = board

    def __call__(self, rank: int) -> str:
        step = -1 if self._board is None else self._board.step_of(rank)
        return f"in {self._name}, step {step}" if step >= 0 else f"in {self._name}"


def _check_loss(assignment: Assignment) -> None:
    """Refuse a loss that looks at parameters which its stage has not.

    Raises:
        OptionError: with their names.
    """
    pipeline = assignment.plan.pipeline
    if pipeline is None or assignment.loss is None:
        return
    last = set(pipeline.stages[-1].ranks)
    elsewhere = {
        name for group in assignment.groups if not last <= set(group.ranks) for name in group.names
    }
    named = list(assignment.model.named_parameters())
    try:
        numbers = parameters_in(assignment.loss.loss, [parameter for _, parameter in named])
    except Exception:  # it cannot be sent: packing names what and why
        return
    strange = [named[number][0] for number in numbers if named[number][0] in elsewhere]
    if strange:
        raise OptionError(
            problem(
                "In a pipeline the loss is computed by the last stage, which has its own "
                "parameters only.",
                received=f"a loss that uses {first_few(strange)}",
                fix="Leave penalties on weights to the optimizer (weight_decay), or use a data "
                "parallel strategy.",
            )
        )


def _check_number(num_regions: int) -> None:
    """As many regions as one message carries are enough for a hundred stages.

    Raises:
        OptionError: there are more.
    """
    if num_regions > MOST_DESCRIPTORS:
        raise OptionError(
            problem(
                f"A plan can have at most {MOST_DESCRIPTORS} regions of shared memory: two for "
                "each set of stages that have parameters in common.",
                received=f"{num_regions}",
                fix="Use fewer stages.",
            )
        )


def _is_reserved(assignment: Assignment, group: ParameterGroup, leader: int) -> bool:
    """Whether the leader takes the memory of a group: where there is something to move in."""
    return not assignment.blank or leader in group.ranks


def _has_options(assignment: Assignment) -> bool:
    """Whether options of the optimizer may change at every step."""
    updater = assignment.updater
    return updater is not None and updater.options_spec() is not None


def _options_store(assignment: Assignment) -> list[_Store]:
    """A store for options of the optimizer that may change at every step, if they may."""
    updater = assignment.updater
    spec = None if updater is None else updater.options_spec()
    if updater is None or spec is None:
        return []
    store = TensorStore.create([spec])
    updater.share_options(store.views[0])
    return [(tuple(range(assignment.plan.num_ranks)), store)]


def _members(
    model: nn.Module, groups: Sequence[ParameterGroup]
) -> list[list[tuple[str, nn.Parameter]]]:
    parameters = dict(model.named_parameters())
    return [[(name, parameters[name]) for name in group.names] for group in groups]


def _spec(assignment: Assignment) -> ExchangeSpec:
    return exchange_spec(
        assignment.plan,
        assignment.model,
        assignment.updater,
        assignment.groups,
        assignment.partitions,
        1 if assignment.loss is None else len(assignment.loss.parts.factors),
    )


def _pack(assignment: Assignment, stores: Sequence[TensorStore]) -> Parcel:
    """Pack an assignment, but for what lies in the stores.

    Raises:
        ShippingError: a part of it cannot be sent; with the part's name.
    """
    parts: dict[str, Any] = {
        "the model": assignment.model,
        "the loss": assignment.loss and assignment.loss.loss,
        **{f"the {name}": value for name, value in vars(assignment.task).items()},
        "the optimizer": assignment.updater,
        "train_step": [each.function for each in assignment.functions],
    }
    parameters = dict(assignment.model.named_parameters())
    known = [
        parameters.get(spec.name, view)
        for store in stores
        for spec, view in zip(store.specs, store.views, strict=True)
    ]
    return pack_named(assignment, parts, known)
