"""Mailboxes between ranks, which are threads here: each with its own view of one region."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.comm.p2p.shm_p2p import Mailbox, MailboxSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import LINE_BYTES, StatusBoard
from lockstep.errors import ModelError
from lockstep.plan.layout import align

TIMEOUT_SECONDS = 20.0


def give_up(waited: float) -> None:
    if waited > TIMEOUT_SECONDS:
        raise TimeoutError(f"waited {waited:.0f} s")


def make_boxes(spec: MailboxSpec, num_ranks: int) -> list[Mailbox]:
    """Each rank's view of one mailbox."""
    start = align(num_ranks * LINE_BYTES)
    region = SharedRegion.create(start + spec.num_bytes)
    return [
        Mailbox(
            spec,
            region,
            start,
            StatusBoard(region, rank=rank, num_ranks=num_ranks, look_around=give_up),
        )
        for rank in range(num_ranks)
    ]


def spec_of(num_slots: int = 2, num_readers: int = 1, num_bytes: int = 4096) -> MailboxSpec:
    return MailboxSpec(
        name="what is tested",
        num_slots=num_slots,
        num_readers=num_readers,
        capacity_bytes=num_bytes,
    )


def together(*bodies: Callable[[], None]) -> None:
    """Run each in a thread; raises what any of them raises."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_SECONDS)
    if errors:
        raise errors[0]


def test_any_tree_arrives_as_it_was() -> None:
    sender, reader = make_boxes(spec_of(), 2)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tree = {
        "image": image,
        "pair": (torch.arange(5), [torch.randn(3).bfloat16(), None]),
        "size": 7,
        "nothing": torch.empty(0, 3),
        "one": torch.tensor(True),
    }
    sender.put(1, tree, [1])
    found = reader.take(1, 0)
    assert found["image"].equal(image)
    assert found["image"].stride() == image.stride()
    assert found["pair"][0].equal(tree["pair"][0])  # type: ignore[index]
    assert found["pair"][1][0].dtype == torch.bfloat16
    assert (found["pair"][1][1], found["size"]) == (None, 7)
    assert found["nothing"].shape == (0, 3)
    assert bool(found["one"])


def test_who_takes_part_in_backward_is_told_and_every_tensor_is_a_leaf() -> None:
    sender, reader = make_boxes(spec_of(), 2)
    weight = torch.randn(3, requires_grad=True)
    sender.put(1, (weight * 2, torch.ones(3)), [1])
    product, plain = reader.take(1, 0)
    assert (product.requires_grad, plain.requires_grad) == (True, False)
    assert product.is_leaf


def test_messages_arrive_in_order_through_few_slots() -> None:
    sender, reader = make_boxes(spec_of(num_slots=2), 2)
    found: list[float] = []

    def send() -> None:
        for number in range(1, 101):
            sender.put(number, torch.full((number,), float(number)), [1])

    def read() -> None:
        for number in range(1, 101):
            tensor = reader.take(number, 0)
            assert len(tensor) == number
            found.append(tensor.mean().item())
            reader.give_back(number, 0)

    together(send, read)
    assert found == [float(number) for number in range(1, 101)]


def test_a_slot_is_not_overwritten_while_any_reader_has_it() -> None:
    sender, first, second = make_boxes(spec_of(num_slots=1, num_readers=2), 3)
    seen: list[Any] = []

    def send() -> None:
        for number in range(1, 51):
            sender.put(number, torch.full((8,), float(number)), [1, 2])

    def read(box: Mailbox, reader: int) -> None:
        for number in range(1, 51):
            tensor = box.take(number, 0)
            seen.append(tensor.eq(number).all().item())
            box.give_back(number, reader)

    together(send, lambda: read(first, 0), lambda: read(second, 1))
    assert seen == [True] * 100


def test_a_message_that_does_not_fit_is_an_error_with_the_name() -> None:
    sender, _ = make_boxes(spec_of(num_bytes=1024), 2)
    with pytest.raises(ModelError, match=r"1\.0 KiB of what is tested"):
        sender.put(1, torch.zeros(300), [1])


def test_what_is_no_tensor_must_be_small() -> None:
    sender, _ = make_boxes(spec_of(), 2)
    with pytest.raises(ModelError, match="besides its tensors"):
        sender.put(1, list(range(10_000)), [1])
