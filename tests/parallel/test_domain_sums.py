"""Sums over domains: ranks as threads, domains as regions of their own.

Over each transport there is, and one more that is written here: a transport is one class.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from queue import Queue

import pytest
import torch

from lockstep.channel.sealed_channel import Channel
from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.collectives.reduce_scatter import ReduceScatter, pairs, partner
from lockstep.comm.collectives.shm_gradient_buffer import SharedGradientBuffer
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.transport import Buffers, Transport
from lockstep.comm.transports.memfd_store import MeetingPoint
from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.comm.transports.process_group_transport import ProcessGroupTransport
from lockstep.comm.transports.tensor_channels import TensorChannels
from lockstep.errors import HostError
from lockstep.plan.layout import elementwise_slices
from tests.channels import channel_pair, send
from tests.sums import tree_sum
from tests.thorough import core_of

SECONDS = 20.0
SHAPES = ((700, 3), (5,), (64, 64), (1,))
LAYOUTS = [(1, 1), (2, 2), (2, 1), (1, 2), (1, 1, 1), (3, 1, 2), (3, 3), (2, 4, 2)]
LAYOUTS_BY_NAME = {" + ".join(map(str, layout)): layout for layout in LAYOUTS}


def hosts_of(counts: Sequence[int]) -> list[range]:
    return [range(sum(counts[:host]), sum(counts[: host + 1])) for host in range(len(counts))]


def make_spec(num_ranks: int) -> GradientSpec:
    tensors = tuple(
        TensorSpec(str(number), shape, tuple(torch.empty(shape).stride()), torch.float32)
        for number, shape in enumerate(SHAPES)
    )
    return GradientSpec(num_shares=num_ranks, tensors=tensors, row_limits=(0,) * len(SHAPES))


def gradients_of(rank: int, step: int) -> list[torch.Tensor | None]:
    """Of very different sizes, so that the order of a sum shows; some are not used."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [
        None
        if (number + rank + step) % 4 == 0 or (number == 3 and step == 1)
        else torch.randn(shape, generator=generator) * 10.0 ** ((rank * 5) % 7)
        for number, shape in enumerate(SHAPES)
    ]


def expected_sums(num_ranks: int, step: int) -> list[torch.Tensor | None]:
    """Whatever host a rank is on."""
    gradients = [gradients_of(rank, step) for rank in range(num_ranks)]
    return [tree_sum(column) for column in zip(*gradients, strict=True)]


class QueueTransport(Transport):
    """A toy: tensors through queues, one for each pair of ranks and direction."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], Queue[torch.Tensor]]) -> None:
        self._rank = rank
        self._queues = queues

    def transfer(self, sends: Buffers, receives: Buffers) -> None:
        for peer, tensors in sends.items():
            for tensor in tensors:
                self._queues[self._rank, peer].put(tensor.clone())
        for peer, tensors in receives.items():
            for tensor in tensors:
                tensor.copy_(self._queues[peer, self._rank].get(timeout=SECONDS))


class World:
    """Ranks on hosts, each in a thread; tensors go from host to host over a kind of transport."""

    def __init__(self, counts: Sequence[int], kind: str = "channels") -> None:
        self.hosts = hosts_of(counts)
        self._kind = kind
        self._meeting_point = MeetingPoint(
            address="127.0.0.1", num_ranks=sum(counts), timeout_seconds=SECONDS
        )
        self._groups: dict[int, ProcessGroups] = {}
        self._queues: dict[tuple[int, int], Queue[torch.Tensor]] = defaultdict(Queue)
        self.num_ranks = sum(counts)
        self.spec = make_spec(self.num_ranks)
        regions = [
            SharedRegion.create(self.spec.num_bytes, self.spec.holes(ranks)) for ranks in self.hosts
        ]
        self.rows = [
            SharedGradientBuffer(self.spec, region, 0, ranks)
            for region, ranks in zip(regions, self.hosts, strict=True)
        ]
        self.barriers = [threading.Barrier(count, timeout=SECONDS) for count in counts]
        self.channels: list[dict[int, Channel]] = [{} for _ in range(self.num_ranks)]
        for low, high in pairs(self.hosts):
            self.channels[low][high], self.channels[high][low] = channel_pair()
        self.pieces = elementwise_slices(self.spec.extents, self.num_ranks, self.num_ranks)

    def close(self) -> None:
        for own in self.channels:
            for end in own.values():
                end.close()

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)

    def transport_of(self, rank: int) -> Transport:
        match self._kind:
            case "gloo":
                ranks = range(self.num_ranks)
                self._groups[rank] = ProcessGroups(
                    {"sums": ranks},
                    rank=rank,
                    backend="gloo",
                    meeting=self._meeting_point.meeting,
                    look_around=be_patient,
                )
                return ProcessGroupTransport(ranks, "sums", self._groups[rank])
            case "queues":
                return QueueTransport(rank, self._queues)
            case _:
                names = {other: f"host {self.host_of(other)}" for other in range(self.num_ranks)}
                return TensorChannels(self.channels[rank], names, be_patient, SECONDS)

    def sums_of(self, rank: int) -> ReduceScatter:
        sums = ReduceScatter(
            self.rows[self.host_of(rank)],
            rank=rank,
            domains=self.hosts,
            rows_of=lambda ranks: range(ranks[0], ranks[-1] + 1),
            transport=self.transport_of(rank),
            is_everywhere=[False] * len(SHAPES),
            meet_here=lambda: None,
        )
        sums.divide(dict(enumerate(self.pieces)))
        return sums

    def put_up(self, step: int) -> None:
        """Every rank's gradients, and on every host the table of all."""
        for rows in self.rows:
            rows.begin_pass()
        for rank in range(self.num_ranks):
            self.rows[self.host_of(rank)].write(rank, gradients_of(rank, step))
        for rows in self.rows:
            for host, ranks in enumerate(self.hosts):
                rows.table[ranks.start : ranks.stop] = self.rows[host].table[
                    ranks.start : ranks.stop
                ]
            rows.collect(self.num_ranks)

    def run(self, body: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                if rank in self._groups:
                    self._groups[rank].open()
                body(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]


def be_patient(waited_seconds: float) -> None:
    assert waited_seconds < SECONDS


@pytest.mark.parametrize("counts", LAYOUTS)
def test_partners_are_on_both_sides(counts: tuple[int, ...]) -> None:
    """Who has a partner on a host is a client of that partner; every pair has one channel."""
    hosts = hosts_of(counts)
    found = set()
    for ranks in hosts:
        for rank in ranks:
            for host, others in enumerate(hosts):
                if rank not in others:
                    other = partner(rank, hosts, host)
                    assert other in others
                    found.add((min(rank, other), max(rank, other)))
    assert pairs(hosts) == found


@pytest.fixture(params=core_of(LAYOUTS_BY_NAME, ["2 + 1", "1 + 1 + 1", "3 + 1 + 2"]))
def layout(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return LAYOUTS_BY_NAME[request.param]


@pytest.fixture(params=["channels", "gloo", "queues"])
def world(request: pytest.FixtureRequest, layout: tuple[int, ...]) -> Iterator[World]:
    made = World(layout, request.param)
    yield made
    made.close()


def test_sums_have_the_same_bits_on_any_hosts(world: World) -> None:
    sums = [world.sums_of(rank) for rank in range(world.num_ranks)]
    for step in range(3):
        world.put_up(step)
        expected = expected_sums(world.num_ranks, step)
        found: dict[int, list[torch.Tensor | None]] = {}

        def reduce(rank: int, found: dict[int, list[torch.Tensor | None]] = found) -> None:
            barrier = world.barriers[world.host_of(rank)]
            found[rank] = sums[rank].reduce_scatter(world.pieces[rank])
            barrier.wait()

        world.run(reduce)
        for rank, pieces in enumerate(world.pieces):
            for piece, total in zip(pieces, found[rank], strict=True):
                whole = expected[piece.parameter]
                if whole is None:
                    assert total is None
                else:
                    assert total is not None
                    same = whole.reshape(-1)[piece.start : piece.stop]
                    assert torch.equal(total.reshape(-1), same)
        world.run(
            lambda rank, found=found: sums[rank].gather(world.pieces[rank], found[rank])  # type: ignore[misc]
        )
        for rows in world.rows:
            for number, whole in enumerate(expected):
                assert whole is None or torch.equal(rows.base(number), whole)


def test_what_a_rank_has_updated_comes_to_all_hosts(world: World) -> None:
    world.put_up(0)
    # On each host tensors of its own, in which its ranks have set their pieces.
    tensors = [
        {number: torch.zeros(shape) for number, shape in enumerate(SHAPES)} for _ in world.hosts
    ]
    for rank, pieces in enumerate(world.pieces):
        for piece in pieces:
            flat = tensors[world.host_of(rank)][piece.parameter].view(-1)
            flat[piece.start : piece.stop] = rank + 1.0
    sums = [world.sums_of(rank) for rank in range(world.num_ranks)]
    world.run(lambda rank: sums[rank].all_gather(tensors[world.host_of(rank)], all_pieces=True))
    for own in tensors:
        for number, tensor in own.items():
            assert torch.equal(tensor, tensors[0][number])
            assert tensor.all()


def test_large_tensors_pass_each_other() -> None:
    """Both ends send more than sockets hold, at once."""
    left, right = channel_pair()
    numbers = [torch.arange(3_000_000) + start for start in (0, 7)]
    found = [torch.empty_like(each) for each in numbers]
    own_ends = [
        TensorChannels({1: left}, {1: "host 1"}, be_patient, SECONDS),
        TensorChannels({0: right}, {0: "host 0"}, be_patient, SECONDS),
    ]
    threads = [
        threading.Thread(
            target=own_ends[own].transfer,
            args=({1 - own: list(numbers[own].split(999_999))}, {1 - own: [found[own]]}),
        )
        for own in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert torch.equal(found[0], numbers[1])
    assert torch.equal(found[1], numbers[0])
    for channel in (left, right):
        channel.close()


def test_a_host_that_hangs_up_is_named() -> None:
    left, right = channel_pair()
    channels = TensorChannels({5: left}, {5: "Host 1 (node1)"}, be_patient, SECONDS)
    send(right, random.Random(0).randbytes(100))
    right.close()
    with pytest.raises(HostError, match=r"Host 1 \(node1\) no longer takes part.*has closed"):
        channels.transfer({}, {5: [torch.empty(1000)]})
    left.close()
