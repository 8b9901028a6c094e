"""Copies of a training in the memory of another host: their pace, their way, which one is taken."""

import math
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.channel.sealed_channel import Channel
from lockstep.cluster.memory_limits import FreeMemory
from lockstep.cluster.place import Address
from lockstep.errors import CheckpointError, HostError
from lockstep.launch.rendezvous.host_rendezvous import meet
from lockstep.train.callbacks.interrupt import Termination
from lockstep.train.checkpointing import state_transfer
from lockstep.train.checkpointing.checkpoints import Checkpoint, CheckpointWriter
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.checkpointing.state_transfer import StateReceiver, StateSender, received
from lockstep.train.checkpointing.trainer_state import TrainerState
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.fault_tolerance import overhead_budget
from lockstep.train.fault_tolerance.lost_hosts import newest_of_all, resumed_from_newest
from lockstep.train.fault_tolerance.overhead_budget import OverheadBudget
from lockstep.train.multihost.discovery import local_host_info
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.resume.fit_record import FitRecord, FitState
from tests.channels import sealed
from tests.control_groups import SECONDS, SECRET, address, place, together

FOLDER: Any = "run"
NUM_HOSTS = 3


def checkpoint(
    by: str, steps: int, epoch: int = 0, batch: int = 0, *, is_finished: bool = False
) -> FitState:
    """One that is as far, with the name of whoever has it."""
    fit = None if is_finished else {"epoch": epoch, "batch": batch}
    state = TrainingState(
        parameters={"weight": torch.arange(1000.0) * steps},
        random={"by": by},
        position={"epochs": 0, "steps": steps, "fit": fit},
    )
    return FitState(
        state=state, record=FitRecord(epochs=0, steps=0, asked={}, is_finished=is_finished)
    )


def copy_of(tensor: torch.Tensor) -> FitState:
    return FitState(state=TrainingState(parameters={"a": tensor}))


def weight_in(message: memoryview) -> torch.Tensor:
    """The tensor of ``copy_of`` in a message."""
    found: torch.Tensor = received(message)["parameters"]["a"]
    return found


def keep(memory: MemoryCheckpoints, copy: FitState, *senders: StateSender) -> None:
    """Keep a copy, and send it."""
    memory.keep(copy, senders, time.monotonic())


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- the pace ------------------------------------------------------------------------------------


def test_what_costs_little_is_done_every_second_and_what_costs_much_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(overhead_budget, "time", SimpleNamespace(monotonic=lambda: now))
    own = OverheadBudget()
    assert own.is_due, "the first time at once"
    for cost, wait in ((0.0, 1.0), (0.01, 1.0), (0.1, 5.0), (2.0, 100.0)):
        began, now = now, now + cost
        own.note(began)
        found = []
        for passed in (wait - 0.01, 0.02):
            now += passed
            found.append(own.is_due)
        assert found == [False, True], cost


def test_the_time_on_the_network_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 0.0)
    near, far = channel_ends()
    with closing(StateSender(near, "Host 1")) as sender:
        sender.keep(copy_of(torch.zeros(1 << 20)), time.monotonic())
        time.sleep(0.2)
        assert not sender.is_due(1), "it is under way"
        with closing(StateReceiver(far, "Host 0", lambda message: None)):
            wait_for(lambda: sender.is_idle)
            assert not sender.is_due(1), "for fifty times as long as it took"
            monkeypatch.setattr(overhead_budget, "PART", 1e9)
            assert sender.is_due(1)


# --- the newest of all ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Hosts]]:
    where = address()
    met = together(*(lambda host=host: enter(host, where) for host in range(NUM_HOSTS)))
    yield met
    for each in met:
        each.close()


def enter(host: int, where: Address) -> Hosts:
    own = place(host, NUM_HOSTS, where)
    group = meet(own, SECRET, local_host_info(own), timeout_seconds=SECONDS)
    return Hosts(own, group, SECONDS)


def memory_of(has: FitState | None) -> MemoryCheckpoints:
    memory = MemoryCheckpoints()
    memory._kept = has
    return memory


FAR = checkpoint("far", 30, 1, 10)
CASES: dict[str, tuple[list[FitState | None], str | None]] = {
    "nobody has one": ([None, None, None], None),
    "the disk alone": ([checkpoint("disk", 5), None, None], "disk"),
    "host 1 alone": ([None, None, FAR], "far"),
    "host 0's memory": ([checkpoint("disk", 29), FAR, checkpoint("older", 28)], "far"),
    "host 1's memory": ([checkpoint("disk", 29), None, FAR], "far"),
    "the disk is newer": ([checkpoint("disk", 31), FAR, FAR], "disk"),
    "as far, the disk": ([checkpoint("disk", 30, 1, 10), FAR, FAR], "disk"),
    "the end of an epoch": ([checkpoint("disk", 30, 2), FAR, FAR], "disk"),
    "the end": ([checkpoint("disk", 30, is_finished=True), FAR, FAR], "disk"),
    "not yet the end": ([checkpoint("disk", 30, 2), None, checkpoint("one", 31, 2, 1)], "one"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_go_on_from_the_newest_that_anybody_has(case: str, hosts: list[Hosts]) -> None:
    (on_disk, *in_memory), expected = CASES[case]
    memories = [memory_of(one) for one in (*in_memory, None)]
    found = together(
        *(
            lambda own=own, memory=memory: newest_of_all(
                own, None if own.host else on_disk, memory, FOLDER
            )
            for own, memory in zip(hosts, memories, strict=True)
        )
    )
    for own in found:
        assert (own and own.state.random["by"]) == expected
        if own is not None:
            weights = own.state.parameters["weight"]
            assert torch.equal(weights, torch.arange(1000.0) * own.state.position["steps"])


def test_a_host_that_goes_on_where_nobody_has_anything_says_so() -> None:
    memory = MemoryCheckpoints()
    assert newest_of_all(None, None, memory, FOLDER) is None
    memory.is_restart = True
    with pytest.raises(CheckpointError, match="none in run on host 0, and no copy"):
        newest_of_all(None, None, memory, FOLDER)


def test_hosts_that_were_asked_for_other_restarts_say_so(tmp_path: Path) -> None:
    def act(own: Hosts) -> None:
        keeper = CheckpointWriter(
            Checkpoint(tmp_path), Termination(), cast(TrainerState, None), 1, print
        )
        memory = MemoryCheckpoints()
        roles = {"is_chief": own.host == 0, "is_divided": False}
        with resumed_from_newest(keeper, memory, own, own.host, **roles):
            raise AssertionError("went on")

    where = address()
    met = together(*(lambda host=host: enter(host, where) for host in range(NUM_HOSTS)))
    found = together(*(lambda own=own: raised_by(act, own) for own in met))
    for own in met:
        own.close()
    assert len(found) == NUM_HOSTS
    for error in found:
        assert "differ in `restarts`" in error
        assert "0 on Host 0" in error


def raised_by(act: Callable[[Hosts], None], own: Hosts) -> str:
    with pytest.raises(HostError) as caught:
        act(own)
    return str(caught.value)


# --- the way -------------------------------------------------------------------------------------


def channel_ends() -> tuple[Channel, Channel]:
    return sealed(*socket.socketpair())


def test_host_1_has_what_host_0_keeps_and_a_host_that_comes_again_gets_it(
    hosts: list[Hosts],
) -> None:
    kept = checkpoint("host 0", 7, 0, 7)
    state = replace(
        kept.state,
        loss_scale={"infinite": math.inf, "counts": Counter({3: 4}), "pair": (1, None)},
        buffers={"half": torch.randn(3, 4).to(torch.bfloat16).T, "none": torch.zeros(0)},
    )
    memories = [MemoryCheckpoints() for _ in hosts]

    def act(own: Hosts) -> None:
        memory = memories[own.host]
        with memory.shared(own, None):
            if own.host == 0:
                assert all(one.is_due(7) for one in memory.destinations)
                memory.keep(replace(kept, state=state), memory.destinations, time.monotonic())
                wait_for(lambda: all(one.done() for one in memory._readers or ()))
            own.wait()

    assert together(*(lambda own=own: act(own) for own in hosts)) == [None] * NUM_HOSTS
    memories[0] = MemoryCheckpoints()  # its script was started again
    found = together(
        *(lambda own=own: newest_of_all(own, None, memories[own.host], FOLDER) for own in hosts)
    )
    for own in found:
        assert own.record == kept.record
        assert own.state.digest() == state.digest()
        assert own.state.loss_scale["counts"] == Counter({3: 4})
        assert type(own.state.loss_scale["pair"]) is tuple


def test_what_all_begin_with_is_kept_until_there_is_more(hosts: list[Hosts]) -> None:
    memories = [MemoryCheckpoints() for _ in hosts]

    def act(own: Hosts) -> object:
        with memories[own.host].shared(own, FAR):
            own.wait()
        return memories[own.host].newest()

    assert together(*(lambda own=own: act(own) for own in hosts)) == [FAR, FAR, None]
    assert memories[0].reusable is None, "others refer to its memory"


def test_memory_is_used_again_and_there_are_two_copies_at_the_most() -> None:
    near, far = channel_ends()
    kept: list[memoryview] = []

    def keep(message: memoryview) -> memoryview | None:
        kept.append(message)
        return kept[-2] if len(kept) > 1 else None

    with closing(StateReceiver(far, "Host 0", keep)), closing(StateSender(near, "Host 1")) as own:
        for step in range(5):
            own.keep(copy_of(torch.full((1000,), step)), time.monotonic())
            wait_for(lambda: own.is_idle)
            assert torch.equal(weight_in(kept[-1]), torch.full((1000,), step))
        assert len({id(message) for message in kept}) == 2
        own.keep(copy_of(torch.zeros(2000)), time.monotonic())  # a larger one
        wait_for(lambda: own.is_idle)
        assert len(weight_in(kept[-1])) == 2000


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_of_what_breaks_off_nothing_is_kept(part: float) -> None:
    near, far = channel_ends()
    kept: list[memoryview] = []
    first = torch.arange(1 << 16)
    with closing(StateReceiver(far, "Host 0", lambda message: kept.append(message))) as receiver:
        with closing(StateSender(near, "Host 1")) as sender:
            sender.keep(copy_of(first), time.monotonic())
            wait_for(lambda: sender.is_idle)
            message = bytes(kept[0])
            cut = int(part * len(message))
            sender._put(state_transfer._SIZE.pack(len(message)), message[:cut])
        wait_for(receiver._receiving.done)
    assert len(kept) == 1
    assert torch.equal(weight_in(kept[0]), first)


def test_what_was_tampered_with_is_not_kept_and_said() -> None:
    near, far = channel_ends()
    kept: list[memoryview] = []
    receiver = StateReceiver(far, "Host 0 (node-a)", lambda message: kept.append(message))
    near.socket.send(bytes(100))
    wait_for(receiver._receiving.done)
    with closing(StateSender(near, "Host 1 (node-b)")) as sender:
        sender.keep(copy_of(torch.zeros(10)), time.monotonic())
        wait_for(lambda: sender.is_idle)
        assert not sender.is_due(1)
        assert "Host 1 (node-b) no longer takes part" in sender.end
    receiver.close()
    with pytest.raises(HostError, match=r"What came from Host 0 \(node-a\) is not what it sent"):
        receiver.check()
    assert not kept


def test_a_host_without_room_for_a_copy_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "free_memory", lambda: FreeMemory(5000, "in a test"))
    monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(overhead_budget, "PART", 1e9)
    near, far = channel_ends()
    kept: list[memoryview] = []
    with (
        closing(StateReceiver(far, "Host 0", lambda message: kept.append(message))),
        closing(StateSender(near, "Host 1 (node-b)")) as sender,
    ):
        sender.keep(copy_of(torch.ones(100)), time.monotonic())
        wait_for(lambda: sender.is_idle)
        sender.keep(copy_of(torch.ones(10_000_000)), time.monotonic())
        wait_for(lambda: sender.is_idle)
        with pytest.warns(UserWarning, match=r": Host 1 \(node-b\) has no memory for it"):
            assert not sender.is_due(1)
        assert not sender.is_due(2)  # a warning would be an error
    assert len(kept) == 1, "the one that had room"


def test_nobody_waits_for_a_host_that_does_not_read() -> None:
    near, far = channel_ends()
    memory = MemoryCheckpoints()
    keep(memory, copy_of(torch.zeros(1 << 22)))
    first = memory.newest()
    assert first is not None
    assert memory.reusable is first.state, "its memory is written to again"
    with closing(far), closing(StateSender(near, "Host 1")) as sender:
        keep(memory, copy_of(torch.zeros(1 << 22)), sender)
        assert not sender.is_idle
        assert memory.reusable is None, "the other host still gets it"


def test_a_host_that_is_gone_is_no_warning_but_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = channel_ends()
    far.close()

    def find_out(waited: float) -> None:
        raise HostError.of_loss("Host 1 is gone.")

    with closing(StateSender(near, "Host 1", find_out)) as sender:
        sender.keep(copy_of(torch.zeros(1)), time.monotonic())
        wait_for(lambda: sender.is_idle)
        assert not sender.is_due(1)  # for now: the hosts may be about to find out
        monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 0.0)
        monkeypatch.setattr(overhead_budget, "PART", 1e9)
        with pytest.raises(HostError, match="gone"):
            sender.is_due(2)


def test_whatever_a_copy_fails_of_ends_the_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tree: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(overhead_budget, "PART", 1e9)
    near, far = channel_ends()
    with (
        closing(StateReceiver(far, "Host 0", lambda message: None)) as receiver,
        closing(StateSender(near, "Host 1")) as sender,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(state_transfer, "encoded", fail)
            sender.keep(copy_of(torch.ones(3)), time.monotonic())
            wait_for(lambda: sender.is_idle)
        with pytest.warns(UserWarning, match="another host: MemoryError: no room"):
            assert not sender.is_due(1)
        assert not sender.is_due(2)
        wait_for(receiver._receiving.done)


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_ended_the_copies_is_no_error_at_the_end(hosts: list[Hosts], *, is_lost: bool) -> None:
    def act(own: Hosts) -> None:
        memory = MemoryCheckpoints()
        memory._exchange_message = fail  # type: ignore[method-assign]
        with memory.shared(own, None):
            if own.host == 0:
                copy = copy_of(torch.ones(3))
                memory.keep(copy, memory.destinations, time.monotonic())
                wait_for(lambda: all(one.done() for one in memory._readers or ()))
            own.wait()
            if is_lost:
                raise ZeroDivisionError("the block's own")

    def fail(message: memoryview) -> None:
        raise RuntimeError("some mistake")

    def outcome(own: Hosts) -> object:
        try:
            act(own)
        except ZeroDivisionError as error:
            return f"{error}"
        return None

    expected = "the block's own" if is_lost else None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = together(*(lambda own=own: outcome(own) for own in hosts))
    assert found == [expected] * NUM_HOSTS
    said = [f"{one.message}" for one in told]
    mistake = "Copies of the training are no longer kept here: RuntimeError: some mistake."
    assert said == ([] if is_lost else [mistake])
