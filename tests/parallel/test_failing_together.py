"""What a host raises when hosts fail together: the news of another host, whoever learned it."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cluster.place import Address
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.errors import DataError, HostError, WorkerError
from lockstep.launch.rendezvous.host_rendezvous import meet
from lockstep.train.multihost.discovery import local_host_info
from lockstep.train.multihost.hosts import Hosts
from tests.control_groups import SECONDS, SECRET, address, place, together
from tests.thorough import core_of

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
    group = meet(own, SECRET, local_host_info(own), timeout_seconds=SECONDS)
    return Hosts(own, group, SECONDS)


@pytest.mark.parametrize(
    "what", core_of(["a large message", "values to bring", "channels"], ["values to bring"])
)
def test_a_host_that_is_stuck_is_not_waited_for_longer_than_allowed(
    what: str, hosts: list[Hosts]
) -> None:
    """It is there, and neither reads nor writes."""
    stuck = hosts[0]
    stuck.timeout_seconds = 0.5
    plan: Any = SimpleNamespace(hosts=(1, 1), host_of=lambda rank: rank)
    waits: dict[str, Callable[[], Any]] = {
        "a large message": lambda: stuck.from_chief(bytes(1 << 26)),
        "values to bring": lambda: stuck.broadcast_region(
            SharedRegion.create(1 << 12), 1, is_current=True
        ),
        "channels": lambda: stuck.open_channels(plan, [(0, 1, "sums")], 0.5),
    }
    with pytest.raises(HostError, match="Host 1 "):
        waits[what]()


def failing(hosts: Hosts, error: BaseException, cause: BaseException | None = None) -> None:
    error.add_note(NOTE)
    with hosts.failing_together():
        raise error from cause


def noted(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def test_what_is_seen_of_another_host_is_raised_as_such(hosts: list[Hosts]) -> None:
    """As when a cable is pulled: rank 0 may wait for rank 1, which waits for the other host."""
    learned = HostError("Host 1 must reach the same step")
    trouble = WorkerError("Rank 1 failed")
    with pytest.raises(HostError) as raised:
        failing(hosts[0], learned, trouble)
    assert raised.value is learned
    assert noted(learned) == [NOTE]
    assert learned.__cause__ is trouble
    with pytest.raises(HostError, match="failed: Host 1 must reach the same step"):
        failing(hosts[1], HostError("it has closed the connection"))


@pytest.mark.parametrize("is_loss", [True, False])
def test_all_know_whether_something_was_lost_or_has_failed(
    is_loss: bool, hosts: list[Hosts]
) -> None:
    trouble = WorkerError("Rank 1 is gone")
    trouble.is_loss = is_loss
    with pytest.raises(WorkerError):
        failing(hosts[1], trouble)
    with pytest.raises(HostError, match="Rank 1 is gone") as raised:
        hosts[0].wait()
    assert raised.value.is_loss is is_loss


class Special(KeyError):  # noqa: N818
    """Only its base is known to all hosts."""


class Strange(Exception):  # noqa: N818
    """Not even that."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("a bad day"), ValueError, "a bad day"),
        (KeyError("name"), KeyError, "'name'"),
        (
            FileNotFoundError(2, "No such file", "x"),
            FileNotFoundError,
            "[Errno 2] No such file: 'x'",
        ),
        (RuntimeError(b"bytes"), RuntimeError, "b'bytes'"),
        (DataError("Sample 7"), DataError, "Sample 7"),
        (Special("name"), KeyError, "\"Special: 'name'\""),
        (
            UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
            UnicodeError,
            "UnicodeDecodeError: 'utf-8'",
        ),
        (ValueError(f"\x1b[31m{2**70}"), ValueError, "\\x1b[31m1180591620717411303424"),
        (ValueError("half: \ud800"), ValueError, "half: ?"),
        (Strange("a bad day"), HostError, "Host 0 (node) failed: Strange: a bad day"),
        (WorkerError("Rank 1 was killed"), HostError, "failed: Rank 1 was killed"),
        (SystemExit(3), HostError, "failed: SystemExit: 3"),
        (KeyboardInterrupt(), HostError, "failed: KeyboardInterrupt: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_one_host_raises_has_the_same_type_on_the_others(
    error: BaseException, kind: type[BaseException], text: str, hosts: list[Hosts]
) -> None:
    """Where all have the type: nothing from another host is unpickled."""
    name = hosts[0].control_group.infos[0].about["name"]
    seen = HostError("Host 0 no longer takes part: it has closed the connection")
    own, found = together(lambda: failing(hosts[0], error), lambda: failing(hosts[1], seen))
    assert own is error
    assert type(found) is kind
    assert text.replace("node", str(name)) in str(found)
    if kind is HostError:
        assert noted(found) == [NOTE]
    else:
        assert isinstance(found.__cause__, HostError)
        assert found.__cause__.__cause__ is seen
        assert noted(found) == [str(found.__cause__), NOTE]
        assert f"Host 0 ({name}) failed: {type(error).__name__}: " in noted(found)[0]


def test_what_a_helper_of_another_host_has_raised_names_the_rank(hosts: list[Hosts]) -> None:
    error = ValueError("a bad day")
    error.__cause__ = WorkerError("Rank 3 failed (in fit, step 2): ValueError: a bad day")
    _, found = together(
        lambda: failing(hosts[0], error, error.__cause__),
        lambda: failing(hosts[1], HostError("it has closed the connection")),
    )
    assert isinstance(found, ValueError)
    assert "failed: Rank 3 failed (in fit, step 2): ValueError: a bad day" in noted(found)[0]


def test_an_error_of_this_host_stays_what_it_is(hosts: list[Hosts]) -> None:
    with pytest.raises(WorkerError, match="Rank 1 was killed") as raised:
        failing(hosts[0], WorkerError("Rank 1 was killed"))
    assert noted(raised.value) == [NOTE]
