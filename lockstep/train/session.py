"""A session: running one task on all ranks of a Plan.

The script's process is rank 0 and computes; helpers are called with everything they need, and keep
nothing from one session to the next. All that lasts (weights, optimizer, position) lies in the
script's own objects.
"""

import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.comm.board import Board
from lockstep.comm.shared_exchange import ExchangeSpec
from lockstep.comm.shared_memory import SharedRegion
from lockstep.data.order import restore_streams, stream_states
from lockstep.launch.helper import HelperContext
from lockstep.launch.pool import give_back, take_team
from lockstep.launch.team import Team
from lockstep.parallel.allocator import keep_freed_memory
from lockstep.parallel.build import build_exchange, build_worker, exchange_spec
from lockstep.parallel.control import FollowerControl, LeaderControl, SoloControl, open_region
from lockstep.parallel.losses import LossAdapter
from lockstep.parallel.parcel import Parcel, unpack
from lockstep.parallel.settings import TorchSettings
from lockstep.parallel.shipping import pack_named
from lockstep.parallel.store import ParameterStore, TensorStore, tensor_spec
from lockstep.parallel.update import Updater
from lockstep.parallel.worker import Worker
from lockstep.plan.spec import Plan
from lockstep.train.tasks import Conductor, Task

# What every helper needs; the template imports it before any helper is born. The second is what
# torch itself imports at the first backward.
_PRELOAD = ("lockstep.train.session", "torch.fx.experimental.symbolic_shapes")


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
    """

    plan: Plan
    model: nn.Module
    loss: LossAdapter | None
    updater: Updater | None
    task: Task
    seed: int
    device: torch.device
    settings: TorchSettings


class Session:
    """Runs assignments, and keeps the team and the parameter store from one to the next.

    Args:
        timeout_seconds: longest wait of rank 0 for its helpers.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._store: ParameterStore | None = None
        self._slots: TensorStore | None = None
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
        spec = exchange_spec(assignment.plan, assignment.model, assignment.updater)
        region = spec.create() if assignment.plan.num_shares > 1 else None
        worker = _worker(assignment, spec, region, rank=0, look_around=lambda waited: None)
        _heed(conductor, worker)
        return assignment.task.run(worker, SoloControl(), conductor)

    def _run_with_helpers(self, assignment: Assignment, conductor: Conductor) -> Any:
        # Before any process starts: what cannot be sent, or finds no memory, shows here.
        stores = [self._adopt(assignment.model)]
        if assignment.updater is not None:
            stores.append(self._adopt_slots(assignment.updater, assignment.model))
        spec = exchange_spec(assignment.plan, assignment.model, assignment.updater)
        parcel = _pack(assignment, stores)
        worker = None
        try:
            region = spec.create()
            team = self._take_team(assignment.plan)
            worker = self._call(team, assignment, stores, parcel, spec, region)
            _heed(conductor, worker)
            result = assignment.task.run(worker, LeaderControl(team, self._timeout), conductor)
            team.finish(self._timeout)
        except BaseException as error:
            self.close()
            if worker is not None and worker.updater is not None:
                lost = worker.updater.recover()
                error.add_note(_state_of_training(worker.exchange.board, lost))
            raise
        finally:
            parcel.close()
        return result

    def _adopt(self, model: nn.Module) -> TensorStore:
        parameters = list(model.named_parameters())
        if (
            self._store is None
            or not self._store.region.is_shared
            or not self._store.fits(parameters)
        ):
            self._store = ParameterStore.adopt(parameters, model.named_buffers())
        self._store.readopt(parameters)
        return self._store

    def _adopt_slots(self, updater: Updater, model: nn.Module) -> TensorStore:
        keys = updater.slot_keys()
        parameters = dict(model.named_parameters())
        specs = tuple(
            tensor_spec(f"{key.parameter}: {key.slot}", parameters[key.parameter]) for key in keys
        )
        if (
            self._slots is None
            or not self._slots.region.is_shared
            or self._slots.specs != specs
            or self._slots_owner() is not updater.owner
        ):
            self._slots, self._slots_owner = TensorStore.create(specs), weakref.ref(updater.owner)
        updater.store_slots(dict(zip(keys, self._slots.views, strict=True)))
        return self._slots

    def readopt(self, model: nn.Module) -> None:
        """Bring parameters that a callback moved back into the store."""
        if self._store is not None:
            self._store.readopt(list(model.named_parameters()))

    def _take_team(self, plan: Plan) -> Team:
        if self._team is not None and not (
            self._team.num_helpers == plan.num_ranks - 1
            and self._threads == plan.threads_per_device
            and self._team.answers()
        ):
            self.close()
        if self._team is None:
            self._threads = plan.threads_per_device
            self._team = take_team(plan.num_ranks - 1, self._threads, _PRELOAD)
        return self._team

    def _call(
        self,
        team: Team,
        assignment: Assignment,
        stores: list[TensorStore],
        parcel: Parcel,
        spec: ExchangeSpec,
        region: SharedRegion,
    ) -> Worker:
        """Send the helpers their parts; returns rank 0's."""
        watch = _Watch(team, self._timeout)
        worker = _worker(assignment, spec, region, rank=0, look_around=watch.look_around)
        watch.watch(worker.exchange.board)
        specs = [store.specs for store in stores]
        body = pickle.dumps((assignment.plan.num_ranks, specs, spec, parcel.payload))
        regions = [region, *(store.region for store in stores)]
        team.call(
            serve,
            body,
            (*(each.descriptor for each in regions), *parcel.descriptors),
            position=_Position(assignment.task, worker.exchange.board),
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
    if worker.exchange.board is not None:
        worker.exchange.board.wants_halt = lambda: conductor.is_interrupted


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
    num_ranks, specs, spec, payload = pickle.loads(body)
    region, *stored = (open_region(number) for number in descriptors[: 1 + len(specs)])
    # All helpers get one parcel, but each has buffers of its own in it.
    parcels = [open_region(number, private=True) for number in descriptors[1 + len(specs) :]]
    stores = [TensorStore(spec, each) for spec, each in zip(specs, stored, strict=True)]
    parameters = [nn.Parameter(view, requires_grad=False) for view in stores[0].views]
    slots = [view for store in stores[1:] for view in store.views]
    assignment: Assignment = unpack(payload, next(iter(parcels), None), [*parameters, *slots])
    for opened in (*parcels, *stored):
        opened.close()
    with assignment.settings.applied(), compute_settings(assignment.plan):
        worker = _worker(
            assignment, spec, region, rank=context.rank, look_around=context.look_around
        )
        assignment.task.run(worker, FollowerControl(context, num_ranks), Conductor())
    return b""


def _worker(
    assignment: Assignment,
    spec: ExchangeSpec,
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


def _pack(assignment: Assignment, stores: list[TensorStore]) -> Parcel:
    """Pack an assignment, but for what lies in the stores.

    Raises:
        ShippingError: a part of it cannot be sent; with the part's name.
    """
    parts: dict[str, Any] = {
        "the model": assignment.model,
        "the loss": assignment.loss and assignment.loss.loss,
        **{f"the {name}": value for name, value in vars(assignment.task).items()},
        "the optimizer": assignment.updater,
    }
    slots = [view for store in stores[1:] for view in store.views]
    return pack_named(assignment, parts, [*assignment.model.parameters(), *slots])
