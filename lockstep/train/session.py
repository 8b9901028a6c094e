"""A session: running one task on all ranks of a Plan.

The script's process is rank 0 and computes; helpers are called with everything they need, and keep
nothing from one session to the next. All that lasts (weights, optimizer, position) lies in the
script's own objects.
"""

import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn

from lockstep.comm.board import Board
from lockstep.comm.exchange import TensorSpec
from lockstep.comm.shared_memory import SharedRegion
from lockstep.data.order import restore_streams, stream_states
from lockstep.errors import OptionError, problem
from lockstep.launch.helper import HelperContext
from lockstep.launch.link import MOST_DESCRIPTORS
from lockstep.launch.pool import give_back, take_team
from lockstep.launch.team import Team
from lockstep.parallel.allocator import keep_freed_memory
from lockstep.parallel.blank import forget_blanks, initialize
from lockstep.parallel.build import AnySpec, build_exchange, build_worker, exchange_spec
from lockstep.parallel.control import FollowerControl, LeaderControl, SoloControl, open_region
from lockstep.parallel.gradient_rules import GradientRules
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.losses import LossAdapter
from lockstep.parallel.parcel import Parcel, parameters_in, unpack
from lockstep.parallel.partition import Partition
from lockstep.parallel.settings import TorchSettings
from lockstep.parallel.shipping import pack_named
from lockstep.parallel.step_functions import StepFunction
from lockstep.parallel.store import ParameterStore, TensorStore, check_separate, slot_spec
from lockstep.parallel.update import Updater
from lockstep.parallel.worker import Worker
from lockstep.plan.spec import LocalUpdate, Plan
from lockstep.train.tasks import Conductor, Task
from lockstep.units import first_few

# What every helper needs; the template imports it before any helper is born. The second is what
# torch itself imports at the first backward.
PRELOAD = ("lockstep.train.session", "torch.fx.experimental.symbolic_shapes")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What every rank gets.

    Attributes:
        plan: the Plan.
        model: the model; its parameters lie in the store where there are helpers.
        loss: the loss, or None for prediction.
        updater: the optimizer, or None where nothing is trained.
        task: what to do.
        seed: of the random streams.
        device: where rank 0's model is.
        settings: torch's, as the script has set them.
        partitions: of the model in stages, by whether it is in training; none without a pipeline.
        groups: the parameters, by the ranks that have them.
        blank: names of the parameters that have no values yet.
        rules: for gradients.
        functions: the user's own training steps, if there are any.
    """

    plan: Plan
    model: nn.Module
    loss: LossAdapter | None
    updater: Updater | None
    task: Task
    seed: int
    device: torch.device
    settings: TorchSettings
    partitions: Mapping[bool, Partition]
    groups: tuple[ParameterGroup, ...]
    blank: frozenset[str]
    rules: GradientRules
    functions: tuple[StepFunction, ...] = ()


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

    def run(self, assignment: Assignment, conductor: Conductor) -> Any:
        """Do the task on all ranks; returns what rank 0's part returns.

        Raises:
            ShippingError: a part of the assignment cannot be sent to helpers.
            WorkerError: a helper failed.
        """
        with compute_settings(assignment.plan):
            if assignment.plan.num_ranks == 1:
                return self._run_alone(assignment, conductor)
            return self._run_with_helpers(assignment, conductor)

    def _run_alone(self, assignment: Assignment, conductor: Conductor) -> Any:
        spec = _spec(assignment)
        if assignment.updater is not None:
            _options_store(assignment)
        is_alone = isinstance(assignment.plan.update, LocalUpdate)
        region = None if is_alone else spec.create()
        worker = _worker(assignment, spec, region, rank=0, look_around=lambda waited: None)
        _heed(conductor, worker)
        return assignment.task.run(worker, SoloControl(), conductor)

    def _run_with_helpers(self, assignment: Assignment, conductor: Conductor) -> Any:
        # Before any process starts: what cannot be sent, or finds no memory, shows here.
        stores: list[tuple[tuple[int, ...], TensorStore]] = []
        ranks = [group.ranks for group in assignment.groups]
        stores += zip(ranks, self._adopt(assignment), strict=True)
        if assignment.updater is not None:
            stores += zip(ranks, self._adopt_slots(assignment), strict=True)
            stores += _options_store(assignment)
        spec = _spec(assignment)
        _check_loss(assignment)
        parcel = _pack(assignment, [store for _, store in stores])
        worker = None
        try:
            region = spec.create()
            team = self._take_team(assignment.plan)
            worker = self._call(team, assignment, stores, parcel, spec, region)
            _heed(conductor, worker)
            _initialize(assignment, worker)
            forget_blanks(assignment.model)
            result = assignment.task.run(worker, LeaderControl(team, self._timeout), conductor)
            team.finish(self._timeout)
        except BaseException as error:
            self.close()
            if worker is not None and worker.updater is not None:
                lost = worker.updater.recover()
                error.add_note(_state_of_training(worker.board, lost))
            raise
        finally:
            parcel.close()
        return result

    def _adopt(self, assignment: Assignment) -> Sequence[ParameterStore]:
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
                    is_reserved=_is_reserved(assignment, group),
                )
                for own, group in zip(members, groups, strict=True)
            ]
        for store, own, group in zip(self._stores, members, groups, strict=True):
            store.readopt(own)
            store.is_elsewhere = 0 not in group.ranks
        self.release_pages()
        return self._stores

    def _adopt_slots(self, assignment: Assignment) -> list[TensorStore]:
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
                TensorStore.create(own, is_reserved=_is_reserved(assignment, group))
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
            slots.is_elsewhere = 0 not in group.ranks
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

    def _take_team(self, plan: Plan) -> Team:
        if self._team is not None and not (
            self._team.num_helpers == plan.num_ranks - 1
            and self._threads == plan.threads_per_device
            and self._team.answers()
        ):
            self.close()
        if self._team is None:
            self._threads = plan.threads_per_device
            self._team = take_team(plan.num_ranks - 1, self._threads, PRELOAD + self.preload)
        return self._team

    def _call(
        self,
        team: Team,
        assignment: Assignment,
        stores: Sequence[tuple[tuple[int, ...], TensorStore]],
        parcel: Parcel,
        spec: AnySpec,
        region: SharedRegion,
    ) -> Worker:
        """Send the helpers their parts; returns rank 0's."""
        watch = _Watch(team, self._timeout)
        worker = _worker(assignment, spec, region, rank=0, look_around=watch.look_around)
        watch.watch(worker.board)
        specs = [(ranks, store.specs) for ranks, store in stores]
        num_groups = len(assignment.groups)
        plan = assignment.plan
        # By value, what the script itself defines: outputs of a model may be of such a class.
        body = cloudpickle.dumps((plan.num_ranks, num_groups, specs, spec, parcel.payload))
        regions = [region, *(store.region for _, store in stores)]
        _check_number(len(regions) + len(parcel.descriptors))
        team.call(
            serve,
            body,
            (*(each.descriptor for each in regions), *parcel.descriptors),
            position=_Position(assignment.task, worker.board),
            timeout_seconds=self._timeout,
        )
        return worker

    def close(self) -> None:
        """End the helpers."""
        team, self._team = self._team, None
        if team is not None:
            team.close()

    def release(self) -> None:
        """Done for good: hand the helpers on, or end them."""
        team, self._team = self._team, None
        if team is not None:
            give_back(team, self._threads)


def _heed(conductor: Conductor, worker: Worker) -> None:
    """Have all ranks stop together when the user wants rank 0 to."""
    if worker.board is not None:
        worker.board.wants_halt = lambda: conductor.is_interrupted


def _state_of_training(board: Board | None, lost: list[str]) -> str:
    """For whoever goes on after an error: what the helpers have left, now that they have ended."""
    assert board is not None
    last = board.last_update
    if last is None:
        return (
            "The weights were being updated: some slices are one step ahead of the others. "
            "Load weights that were saved before you go on."
        )
    if last < 0:
        return "The weights are whole, as fit has found them."
    whole = f"The weights are whole, as step {last} has left them, and so is the optimizer"
    return f"{whole}, but for the slots of {', '.join(lost)}: lost." if lost else f"{whole}."


class _Watch:
    """What rank 0 looks after while it waits at the board."""

    def __init__(self, team: Team, timeout_seconds: float) -> None:
        self._team = team
        self._timeout = timeout_seconds
        self._board: Callable[[], Board | None] = lambda: None

    def watch(self, board: Board | None) -> None:
        """Say where waiting takes place."""
        if board is not None:
            # The board knows this object. A cycle would keep its memory until the collector runs.
            self._board = weakref.ref(board)

    def look_around(self, waited_seconds: float) -> None:
        """Raise if waiting on is in vain."""
        board = self._board()
        assert board is not None
        self._team.look_around(board.is_awaited)
        if waited_seconds > self._timeout:
            self._team.raise_timeout(waited_seconds)


class _Position:
    """Where ranks are, for messages."""

    def __init__(self, task: Task, board: Board | None) -> None:
        self._name = type(task).__name__.removesuffix("Task").lower()
        self._board = board

    def __call__(self, rank: int) -> str:
        step = -1 if self._board is None else self._board.step_of(rank)
        return f"in {self._name}, step {step}" if step >= 0 else f"in {self._name}"


def serve(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    """A helper's part of ``Session.run``."""
    num_ranks, num_groups, specs, spec, payload = pickle.loads(body)
    region = open_region(descriptors[0])
    stored = descriptors[1 : 1 + len(specs)]
    # All helpers get one parcel, but each has buffers of its own in it.
    parcels = [open_region(number, private=True) for number in descriptors[1 + len(specs) :]]
    # Parameters come first, then slots; of both, what other ranks alone have stays there.
    opened = [
        _open_store(
            own,
            number,
            is_here=context.rank in ranks,
            is_ours=context.rank == ranks[0],
        )
        for (ranks, own), number in zip(specs, stored, strict=True)
    ]
    parameters = [view for views in opened[:num_groups] for view in views]
    tensors = [
        *(nn.Parameter(view, requires_grad=False) for view in parameters),
        *(view for views in opened[num_groups:] for view in views),
    ]
    assignment: Assignment = unpack(payload, next(iter(parcels), None), tensors)
    for each in parcels:
        each.close()
    with assignment.settings.applied(), compute_settings(assignment.plan):
        worker = _worker(
            assignment, spec, region, rank=context.rank, look_around=context.look_around
        )
        _initialize(assignment, worker)
        assignment.task.run(worker, FollowerControl(context, num_ranks), Conductor())
    return b""


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


def _is_reserved(assignment: Assignment, group: ParameterGroup) -> bool:
    """Whether rank 0 takes the memory of a group: it does where there is something to move in."""
    return not assignment.blank or 0 in group.ranks


def _options_store(assignment: Assignment) -> list[tuple[tuple[int, ...], TensorStore]]:
    """A store for options of the optimizer that may change at every step, if they may."""
    updater = assignment.updater
    spec = None if updater is None else updater.options_spec()
    if updater is None or spec is None:
        return []
    store = TensorStore.create([spec])
    updater.share_options(store.views[0])
    return [(tuple(range(assignment.plan.num_ranks)), store)]


def _initialize(assignment: Assignment, worker: Worker) -> None:
    """Each group's first rank gives its parameters their first values, if they have none."""
    if assignment.blank:
        own = {
            name
            for group in assignment.groups
            if group.ranks[0] == worker.rank
            for name in group.names
        }
        initialize(assignment.model, own & assignment.blank, assignment.seed)
        worker.barrier()


def _open_store(
    specs: Sequence[TensorSpec], descriptor: int, *, is_here: bool, is_ours: bool
) -> list[torch.Tensor]:
    """The tensors of a store; without memory where another rank has them.

    The first rank that has them takes the memory, unless rank 0 has done so already.
    """
    if not is_here:
        os.close(descriptor)
        return [
            torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
            for spec in specs
        ]
    region = open_region(descriptor)
    if is_ours:
        region.reserve(0, region.num_bytes)
    store = TensorStore(specs, region)
    region.close()
    return store.views


def _members(
    model: nn.Module, groups: Sequence[ParameterGroup]
) -> list[list[tuple[str, nn.Parameter]]]:
    parameters = dict(model.named_parameters())
    return [[(name, parameters[name]) for name in group.names] for group in groups]


def _spec(assignment: Assignment) -> AnySpec:
    return exchange_spec(
        assignment.plan,
        assignment.model,
        assignment.updater,
        assignment.groups,
        assignment.partitions,
        1 if assignment.loss is None else len(assignment.loss.parts.factors),
    )


def _worker(
    assignment: Assignment,
    spec: AnySpec,
    region: SharedRegion | None,
    *,
    rank: int,
    look_around: Callable[[float], None],
) -> Worker:
    exchange = build_exchange(assignment.plan, spec, region, rank=rank, look_around=look_around)
    return build_worker(
        assignment.plan,
        rank=rank,
        model=assignment.model,
        loss=assignment.loss,
        updater=assignment.updater,
        exchange=exchange,
        spec=spec,
        groups=assignment.groups,
        partitions=assignment.partitions,
        rules=assignment.rules,
        functions=assignment.functions,
        seed=assignment.seed,
        device=assignment.device,
    )


@contextmanager
def compute_settings(plan: Plan) -> Iterator[None]:
    """The Plan's threads within the block; the process's own threads and random states after it."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    streams = stream_states()
    if plan.threads_per_device is not None:
        torch.set_num_threads(plan.threads_per_device)
    try:
        yield
    finally:
        restore_streams(streams)
        if plan.threads_per_device is not None:
            torch.set_num_threads(threads)


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
