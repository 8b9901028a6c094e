"""Groups of a backend that works on a device are ended, once, whoever lets go of them."""

import threading
from typing import Any

import pytest
import torch

from lockstep.comm.transports import process_group
from lockstep.comm.transports.memfd_store import MeetingPoint
from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.errors import WorkerError


class _Group:
    def __init__(self) -> None:
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


@pytest.mark.parametrize("fails", [False, True])
def test_groups_on_a_device_are_ended_when_nobody_needs_them(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    made: list[_Group] = []

    def make(store: Any, rank: int, size: int) -> _Group:
        made.append(_Group())
        return made[-1]

    backend = process_group._Backend(maker=lambda address, device: make)
    monkeypatch.setitem(process_group._BACKENDS, "nccl", backend)
    point = MeetingPoint(address="127.0.0.1", num_ranks=1, timeout_seconds=9.0)
    groups = ProcessGroups(
        {"one": (0,), "two": (0,)},
        rank=0,
        backend="nccl",
        meeting=point.meeting,
        look_around=lambda seconds: None,
    )
    groups.open()
    assert [group.num_aborts for group in made] == [0, 0]
    if fails:
        groups.abandon()
        assert [group.num_aborts for group in made] == [1, 1]
    del groups
    assert [group.num_aborts for group in made] == [1, 1]


def test_who_waits_for_a_message_looks_around() -> None:
    """The other rank has stopped before it has sent the message: no wait for it ends by itself."""
    point = MeetingPoint(address="127.0.0.1", num_ranks=2, timeout_seconds=60.0)
    are_open = threading.Event()
    waited: list[float] = []

    def look_around(seconds: float) -> None:
        waited.extend([seconds] if are_open.is_set() else [])
        if len(waited) == 3:
            raise WorkerError("Rank 1 is stopped.")

    groups = [
        ProcessGroups(
            {"all": (0, 1)},
            rank=rank,
            backend="gloo",
            meeting=point.meeting,
            look_around=look_around,
        )
        for rank in range(2)
    ]
    other = threading.Thread(target=groups[1].open)
    other.start()
    groups[0].open()
    other.join()
    are_open.set()
    work = groups[0]["all"].recv([torch.empty(8)], 1, 0)
    with pytest.raises(WorkerError, match="Rank 1 is stopped"):
        groups[0].finish([work])
    del groups[1]  # its end closes the connection: the thread that waits ends
