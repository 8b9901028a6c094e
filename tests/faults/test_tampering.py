"""Whatever is changed between two hosts ends in an error on both, and in no wrong value.

Hosts are threads that meet, exchange messages and send tensors, or scripts that train; a proxy is
between them. Each test asserts that it has done what it was told.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cluster.place import Address
from lockstep.comm.transports.tensor_channels import TensorChannels
from lockstep.errors import HostError
from lockstep.launch.rendezvous.control_group import ControlGroup
from lockstep.launch.rendezvous.pair_channels import open_channels
from tests.control_groups import SECONDS, address, enter, together
from tests.launchers import on_loopback
from tests.proxy import BACK, THERE, Fault, Proxy, detour
from tests.thorough import core_of

FIT = str(Path(__file__).with_name("tampered_fit.py"))
NUM_FLIPS, NUM_INJECTIONS = 100, 50
# Connections in the order in which host 1 makes them.
CIRCLE, LARGE, SMALL = range(3)
STREAMS = [(number, way) for number in (CIRCLE, LARGE, SMALL) for way in (THERE, BACK)]
NUM_STEPS = 3
FOUND = "is not what it sent: the connection was tampered with"
CUT = r"no longer (answers|takes part)|failed"

Rest = Callable[[], object]


class WrongError(AssertionError):
    """What came is neither what was sent, nor an error."""


def message(host: int, step: int) -> bytes:
    return random.Random(10 * step + host).randbytes(500)


def tensors(host: int, step: int) -> dict[int, list[torch.Tensor]]:
    """By rank: one that takes several records, and many that share one."""
    generator = torch.Generator().manual_seed(10 * step + host)
    return {
        0: [torch.randn(150_000, generator=generator)],
        1: [torch.randn(size, generator=generator) for size in range(1, 40)],
    }


def give_up(waited_seconds: float) -> None:
    assert waited_seconds < SECONDS


def train(group: ControlGroup, rest: Rest) -> str:
    """What hosts do, and see whether they get what the other one has sent."""
    other = 1 - group.host
    (opened,) = open_channels(group, {(0, 1): 2}, SECONDS, give_up).values()
    names = dict.fromkeys((0, 1), group.name_of(other))
    channels = TensorChannels(
        dict(enumerate(opened)), names, lambda waited: group.look_around(), SECONDS
    )
    try:
        for step in range(NUM_STEPS):
            found = {
                rank: [torch.empty_like(each) for each in own]
                for rank, own in tensors(other, step).items()
            }
            channels.transfer(tensors(group.host, step), found)
            for rank, expected in tensors(other, step).items():
                if not all(map(torch.equal, found[rank], expected)):
                    raise WrongError(f"tensors of step {step}")
            told = group.exchange(message(group.host, step), give_up)
            if told != [message(host, step) for host in (0, 1)]:
                raise WrongError(f"messages of step {step}")
        rest()
        group.exchange(b"", give_up)
    finally:
        for channel in opened:
            channel.close()
    return "right"


def host(number: int, where: Address, rest: Rest) -> str:
    group = enter(number, 2, where)
    try:
        return train(group, rest)
    except BaseException as error:
        group.fail(str(error), error)
        raise
    finally:
        group.close()


@contextmanager
def between(monkeypatch: pytest.MonkeyPatch, fault: Fault | None = None) -> Iterator[Proxy]:
    """A proxy that all connections of this process go through."""
    proxy = Proxy(fault)
    with monkeypatch.context() as patch:
        detour(patch, proxy.port)
        try:
            yield proxy
        finally:
            proxy.close()


@pytest.fixture(scope="module")
def lengths() -> dict[tuple[int, int], int]:
    """Of each stream, the bytes that come before the hosts part; which nobody has changed."""
    found: dict[tuple[int, int], int] = {}
    with pytest.MonkeyPatch.context() as patch, between(patch) as proxy:
        barrier = threading.Barrier(2, lambda: found.update(proxy.counts))
        rest = partial(barrier.wait, SECONDS)
        where = address()
        outcomes = together(*(partial(host, number, where, rest) for number in (0, 1)))
    assert outcomes == ["right", "right"]
    assert sorted(found) == STREAMS
    return found


def outcomes_with(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> Sequence[object]:
    """What becomes of both hosts; the fault must have happened."""
    where = address()
    with between(monkeypatch, fault):
        outcomes = together(*(partial(host, number, where, lambda: None) for number in (0, 1)))
    assert fault.has_fired, outcomes
    return outcomes


def check_errors(outcomes: Sequence[object], text: str) -> None:
    """Both hosts end with an error, at least one of which says this of the other by name."""
    for outcome in outcomes:
        assert isinstance(outcome, HostError), outcomes
    said = [str(outcome) for outcome in outcomes]
    assert any(text in one for one in said), said
    assert any(f"came from {name}" in one for one in said for name in ("Host", "the host at")), said


def place(number: int, lengths: dict[tuple[int, int], int]) -> tuple[random.Random, Fault]:
    """A random place of a random stream; streams in turn, so that short ones have their share."""
    generator = random.Random(number)
    connection, direction = STREAMS[number % len(STREAMS)]
    # The length of a port in a message differs by a byte or two.
    offset = generator.randrange(lengths[connection, direction] - 8)
    return generator, Fault(connection=connection, direction=direction, offset=offset)


@pytest.mark.parametrize("number", core_of(range(NUM_FLIPS), range(6)))
def test_a_flipped_bit_is_an_error_on_both_hosts(
    number: int, lengths: dict[tuple[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, fault = place(number, lengths)
    fault.bit = generator.randrange(8)
    check_errors(outcomes_with(fault, monkeypatch), FOUND)


@pytest.mark.parametrize("number", core_of(range(NUM_INJECTIONS), range(4)))
def test_what_is_injected_is_an_error_on_both_hosts(
    number: int, lengths: dict[tuple[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random bytes, and what has passed before, once more."""
    generator, fault = place(number, lengths)
    fault.injected = b"replay" if number % 2 and fault.offset else generator.randbytes(100)
    check_errors(outcomes_with(fault, monkeypatch), FOUND)


@pytest.mark.parametrize("number", core_of(range(30), range(2)))
def test_a_connection_that_is_cut_is_an_error_on_both_hosts(
    number: int, lengths: dict[tuple[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the rendezvous, to which a host may come again."""
    _, fault = place(len(STREAMS) * number + 2 + number % 4, lengths)
    fault.cuts = True
    for outcome in outcomes_with(fault, monkeypatch):
        assert isinstance(outcome, HostError), outcome


# --- scripts that train ---------------------------------------------------------------------------


def fit(fault: Fault | None) -> tuple[list[tuple[int, list[Any], str]], bool]:
    """Status, what was told, and errors of both hosts; and whether the fault has happened."""
    proxy = Proxy(fault)
    try:
        with on_loopback([FIT, str(proxy.port)], devices=2) as processes:
            ends = [process.finish() for process in processes]
    finally:
        proxy.close()
    told = [
        (status, [json.loads(line) for line in out.splitlines()], err) for status, out, err in ends
    ]
    return told, fault is not None and fault.has_fired


def test_training_through_a_proxy_that_changes_nothing() -> None:
    (first, second), _ = fit(None)
    assert first == second
    assert first[0] == 0


# The ranks of host 0 are 0 and 1, and each has a partner on host 1: a channel of the process that
# leads, and one of a helper's. Before these come the control group and the heartbeats.
TENSORS = [Fault(number, way, 50_000, bit=7) for number, way in ((2, THERE), (3, BACK))]
MESSAGES = [Fault(0, way, 5_000, bit=0) for way in (THERE, BACK)]
LATER = [Fault(3, BACK, 300_000, bit=3)]  # in the second call of fit
FAULTS = {
    f"{name} {number}": fault
    for name, faults in (("tensors", TENSORS), ("messages", MESSAGES), ("later", LATER))
    for number, fault in enumerate(faults)
}


@pytest.mark.parametrize("name", core_of(FAULTS, ["tensors 1"], []))
def test_training_ends_with_an_error_on_both_hosts(name: str) -> None:
    ends, has_fired = fit(FAULTS[name])
    assert has_fired, ends
    for status, told, err in ends:
        assert status == 1, (told, err)
        assert told[-1][0] == "HostError", told
        assert (len(told) == 2) == name.startswith("later")
    assert any(FOUND in told[-1][1] for _, told, _ in ends), ends
    assert all("Host " in told[-1][1] for _, told, _ in ends), ends
