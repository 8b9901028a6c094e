"""Messages between ranks over a process group, here threads of one process with a group each."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.comm.p2p.interface import MailKey, SharedMail
from lockstep.comm.p2p.process_group_p2p import GroupMail, Pair, announcement_key, channel_name
from lockstep.comm.p2p.shm_p2p import MailboxSpec
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.comm.transports.memfd_store import MeetingPoint
from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.errors import WorkerError

SECONDS = 20.0
KEY, OTHER, BACK = (MailKey("value", 3, 0, 0), MailKey("value", 5, 0, 0), MailKey("value", 1, 1, 1))


def be_patient(waited_seconds: float) -> None:
    assert waited_seconds < SECONDS


def run(bodies: list[Callable[[GroupMail], None]], num_slots: int = 4) -> None:
    """Run a body per rank, each with its end of channels between all."""
    ranks = range(len(bodies))
    spec = MailboxSpec(name="test", num_slots=num_slots, num_readers=1, capacity_bytes=0)
    channels: dict[Pair, MailboxSpec] = {
        (one, other): spec for one in ranks for other in ranks if one != other
    }
    layout = ExchangeSpec(
        num_ranks=len(ranks),
        share_ranks=(0,),
        groups=(),
        mail_bytes=(len(channels) * spec.num_bytes,),
    )
    region = layout.create()
    point = MeetingPoint(address="127.0.0.1", num_ranks=len(ranks), timeout_seconds=SECONDS)
    errors: list[BaseException] = []

    def live(rank: int) -> None:
        try:
            board = StatusBoard(region, rank=rank, num_ranks=len(ranks), look_around=be_patient)
            groups = ProcessGroups(
                {channel_name(pair): pair for pair in channels},
                rank=rank,
                backend="gloo",
                meeting=point.meeting,
                look_around=be_patient,
            )
            groups.open()
            announcements = SharedMail(
                {announcement_key(pair): spec for pair, spec in channels.items()},
                region,
                layout.mail_offsets[0],
                board,
                ranks_here=ranks,
            )
            mail = GroupMail(channels, announcements, groups, rank, torch.device("cpu"))
            bodies[rank](mail)
            board.barrier()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def test_messages_of_any_form_are_found_in_any_order() -> None:
    trees: list[Any] = [
        {"a": torch.arange(6.0).reshape(2, 3).T, "b": [None, torch.tensor([True, False]), "text"]},
        (torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.empty(0, 4), 3),
        torch.randn(2, 3, 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
        [None, None],
    ]

    def send(mail: GroupMail) -> None:
        for message, tree in enumerate(trees):
            mail.put(KEY, message, tree, [1])
        mail.put(OTHER, 0, trees[0], [1])
        assert mail.take(BACK, 0) == "back"

    def receive(mail: GroupMail) -> None:
        mail.put(BACK, 0, "back", [0])
        first = mail.take(OTHER, 0)  # sent last
        found = [mail.take(KEY, message) for message in (3, 2, 1, 0)][::-1]
        assert first["b"][2] == "text"
        assert torch.equal(first["a"], trees[0]["a"])
        assert found[0]["a"].stride() == trees[0]["a"].stride()
        assert found[0]["b"][0] is None
        assert torch.equal(found[0]["b"][1], trees[0]["b"][1])
        value, empty, number = found[1]
        assert (value.requires_grad, value.is_leaf, empty.requires_grad, number) == (1, 1, 0, 3)
        assert torch.equal(value, trees[1][0])
        assert empty.shape == (0, 4)
        assert found[2].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found[2], trees[2])
        assert found[3] == [None, None]
        for message in range(4):
            mail.give_back(KEY, message, 0)
        with pytest.raises(KeyError):
            mail._here[KEY, 0]

    run([send, receive], num_slots=8)


def test_each_reader_has_a_leaf_of_its_own_and_the_sender_may_be_one() -> None:
    value = torch.ones(3, requires_grad=True)

    def send(mail: GroupMail) -> None:
        changing = value.detach().clone().requires_grad_()
        mail.put(KEY, 1, changing, [0, 1, 1, 2])
        with torch.no_grad():
            changing.zero_()
        check(mail, 1)

    def check(mail: GroupMail, num_readers: int) -> None:
        leaves: list[Tensor] = [mail.take(KEY, 1) for _ in range(num_readers)]
        for reader, leaf in enumerate(leaves):
            (leaf * 2).sum().backward()
            assert leaf.grad is not None
            assert leaf.grad.tolist() == [2.0, 2.0, 2.0]
            assert leaf.tolist() == [1.0, 1.0, 1.0]
            mail.give_back(KEY, 1, reader)

    run([send, lambda mail: check(mail, 2), lambda mail: check(mail, 1)])


def test_a_sender_is_no_further_ahead_than_there_are_slots() -> None:
    sent: list[int] = []
    begun = threading.Event()

    def send(mail: GroupMail) -> None:
        for message in range(12):
            mail.put(KEY, message, torch.full((1000,), message), [1])
            sent.append(message)
            if message == 3:
                begun.set()

    def receive(mail: GroupMail) -> None:
        assert begun.wait(SECONDS)
        threading.Event().wait(0.05)
        assert len(sent) == 4
        for message in range(12):
            assert mail.take(KEY, message).tolist() == [message] * 1000
            mail.give_back(KEY, message, 0)

    run([send, receive])


def test_a_message_comes_while_its_reader_has_another() -> None:
    """Both are announced before the first is read: the second's transfer ends before it is read."""
    announced, is_over = threading.Event(), threading.Event()
    values = [torch.randn(1 << 16), torch.randn(1 << 16)]

    def send(mail: GroupMail) -> None:
        for message, value in enumerate(values):
            mail.put(KEY, message, value, [1])
        announced.set()
        for work, _ in mail._out[1]._pending:
            mail._groups.finish_begun(work)
        is_over.set()

    def receive(mail: GroupMail) -> None:
        assert announced.wait(SECONDS)
        assert torch.equal(mail.take(KEY, 0), values[0])
        assert is_over.wait(SECONDS)
        assert torch.equal(mail.take(KEY, 1), values[1])

    run([send, receive])


def test_a_message_to_a_rank_that_is_gone_names_it() -> None:
    """The backend says that the connection is closed, to whoever begins to send."""

    class Closed:
        def send(self, tensors: list[Tensor], place: int, tag: int) -> None:
            raise RuntimeError("Connection closed by peer")

    def look_around(waited_seconds: float) -> None:
        raise WorkerError("Rank 1 is gone.")

    groups = ProcessGroups(
        {},
        rank=0,
        backend="gloo",
        meeting=MeetingPoint(address="127.0.0.1", num_ranks=2, timeout_seconds=SECONDS).meeting,
        look_around=look_around,
    )
    groups._groups = {channel_name((0, 1)): Closed()}
    spec = MailboxSpec(name="test", num_slots=1, num_readers=1, capacity_bytes=0)
    announcements = SharedMail.__new__(SharedMail)  # the message is announced after it is begun
    mail = GroupMail({(0, 1): spec}, announcements, groups, 0, torch.device("cpu"))
    with pytest.raises(WorkerError, match="Rank 1 is gone"):
        mail.put(KEY, 0, torch.ones(3), [1])
