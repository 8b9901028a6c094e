"""What a host raises when hosts fail together: the news of another host, whoever learned it."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cluster.place import Address
from lockstep.comm.shared_memory import SharedRegion
from lockstep.errors import HostError, WorkerError
from lockstep.launch.rendezvous import meet
from lockstep.train.hosts import Hosts, own_card
from tests.circles import SECONDS, SECRET, address, place, together

NOTE = "The weights are those of step 3."


@pytest.fixture
def hosts() -> Iterator[list[Hosts]]:
    where = address()
    met = together(lambda: enter(0, where), lambda: enter(1, where))
    yield met
    for each in met:
        each.close()


def enter(host: int, where: Address) -> Hosts:
    own = place(host, 2, where)
    circle = meet(own, SECRET, own_card(own), timeout_seconds=SECONDS)
    return Hosts(own, circle, SECONDS)


@pytest.mark.parametrize("what", ["a large message", "values to bring", "wires"])
def test_a_host_that_is_stuck_is_not_waited_for_longer_than_allowed(
    what: str, hosts: list[Hosts]
) -> None:
    """It is there, and neither reads nor writes."""
    stuck = hosts[0]
    stuck.timeout_seconds = 0.5
    plan: Any = SimpleNamespace(hosts=(1, 1), host_of=lambda rank: rank)
    waits: dict[str, Callable[[], Any]] = {
        "a large message": lambda: stuck.from_chief(bytes(1 << 26)),
        "values to bring": lambda: stuck.bring(SharedRegion.create(1 << 12), 1, is_here=True),
        "wires": lambda: stuck.open_wires(plan, [(0, 1, "sums")], 0.5),
    }
    with pytest.raises(HostError, match="Host 1 "):
        waits[what]()


def failing(hosts: Hosts, error: BaseException, cause: BaseException | None = None) -> None:
    error.add_note(NOTE)
    with hosts.failing_together():
        raise error from cause


def noted(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def test_what_a_helper_learned_of_another_host_is_raised_as_such(hosts: list[Hosts]) -> None:
    """As when a cable is pulled: rank 0 may wait for rank 1, which waits for the other host."""
    learned = HostError("Host 1 must come to the same step")
    trouble = WorkerError("Rank 1 failed")
    with pytest.raises(HostError) as raised:
        failing(hosts[0], trouble, learned)
    assert raised.value is learned
    assert noted(learned) == [NOTE]
    assert learned.__cause__ is trouble
    assert trouble.__cause__ is None  # or the two would be each other's cause
    with pytest.raises(HostError, match="failed: Host 1 must come to the same step"):
        failing(hosts[1], HostError("it has closed the connection"))


def test_what_another_host_says_goes_before_what_is_seen_of_it(hosts: list[Hosts]) -> None:
    seen = HostError("Host 0 no longer takes part: it has closed the connection")
    mistake, said = together(
        lambda: failing(hosts[0], ValueError("a bad day")),
        lambda: failing(hosts[1], WorkerError("Rank 3 failed"), seen),
    )
    assert isinstance(mistake, ValueError)
    assert isinstance(said, HostError)
    assert "ValueError: a bad day" in str(said)
    assert noted(said) == [NOTE]


def test_an_error_of_this_host_stays_what_it_is(hosts: list[Hosts]) -> None:
    with pytest.raises(WorkerError, match="Rank 1 was killed") as raised:
        failing(hosts[0], WorkerError("Rank 1 was killed"))
    assert noted(raised.value) == [NOTE]
