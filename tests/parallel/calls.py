"""What the tests of this folder have all ranks do. Helpers import this module."""

import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.collectives.gradients import Gradients, TensorSpec
from lockstep.comm.exchange import Exchange
from lockstep.comm.exchange_spec import ExchangeSpec, GroupSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import LINE_BYTES, StatusBoard
from lockstep.launch.workers.helper import HelperContext
from lockstep.launch.workers.pool import take_team
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.control import FollowerControl, LeaderControl, open_region
from lockstep.plan.layout import elementwise_slices
from lockstep.plan.shares import replica_of_share

TIMEOUT_SECONDS = 180.0
PRELOAD = ("lockstep.train.runtime.session",)

Part = Callable[..., Any]


def start_team(num_ranks: int) -> Team:
    return take_team(num_ranks - 1, 1, PRELOAD)


def run_on_all(team: Team, part: Part, num_bytes: int, *arguments: Any) -> list[Any]:
    """``part(rank, num_ranks, region, look_around, *arguments)`` on every rank; all the results."""
    region = SharedRegion.create(num_bytes)
    num_ranks = team.num_helpers + 1
    body = pickle.dumps((part, num_ranks, arguments))
    team.call(
        run_part,
        body,
        (region.descriptor,),
        position=lambda rank: "in a test",
        timeout_seconds=TIMEOUT_SECONDS,
    )

    def look_around(waited_seconds: float) -> None:
        team.look_around()
        assert waited_seconds < TIMEOUT_SECONDS

    own = part(0, num_ranks, region, look_around, *arguments)
    others = [pickle.loads(payload) for payload, _ in team.gather(TIMEOUT_SECONDS)]
    team.finish(TIMEOUT_SECONDS)
    return [own, *others]


def run_part(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    part, num_ranks, arguments = pickle.loads(body)
    region = open_region(descriptors[0])
    result = part(context.rank, num_ranks, region, context.look_around, *arguments)
    context.send(pickle.dumps(result))
    region.close()
    return b""


# --- the board -----------------------------------------------------------------------------------


def cross_barriers(
    rank: int,
    num_ranks: int,
    region: SharedRegion,
    look_around: Callable[[float], None],
    num_barriers: int,
    seed: int,
) -> int:
    """Cross barriers after random delays; returns how often some rank was not where it must be.

    Each rank notes the number of the barrier before it enters. Past it, all must have noted that
    number, and none more than the next.
    """
    board = StatusBoard(region, rank=rank, num_ranks=num_ranks, look_around=look_around)
    notes = region.tensor(num_ranks * LINE_BYTES, torch.int64, (num_ranks,), (1,)).numpy()
    dice = random.Random(f"{seed} {rank}")
    wrong = 0
    for number in range(1, num_barriers + 1):
        delay(dice)
        notes[rank] = number
        board.barrier()
        wrong += not all(number <= note <= number + 1 for note in notes.tolist())
    return wrong


def delay(dice: random.Random) -> None:
    """None, a little computation, or a nap that is longer than any patience of the board."""
    kind = dice.randrange(20)
    if kind == 0:
        time.sleep(dice.uniform(0.0, 0.005))
    elif kind < 5:
        until = time.perf_counter() + dice.uniform(0.0, 0.0002)
        while time.perf_counter() < until:
            pass


def post_and_read(
    rank: int,
    num_ranks: int,
    region: SharedRegion,
    look_around: Callable[[float], None],
    num_posts: int,
) -> int:
    """A chain: each rank waits for the one before it; returns how often a value was not there."""
    board = StatusBoard(region, rank=rank, num_ranks=num_ranks, look_around=look_around)
    values = region.tensor(num_ranks * LINE_BYTES, torch.int64, (num_ranks,), (1,)).numpy()
    before, wrong = (rank - 1) % num_ranks, 0
    for number in range(1, num_posts + 1):
        if rank > 0:
            wrong += board.wait_for(before, number) < number or int(values[before]) < number
        values[rank] = number
        board.post(number)
        if rank == 0:
            board.wait_for(before, number)
    return wrong


def announce_and_hear(
    rank: int,
    num_ranks: int,
    region: SharedRegion,
    look_around: Callable[[float], None],
    num_steps: int,
    seed: int,
) -> int:
    """Up to four announcements between barriers, as in training; returns how many were misheard."""
    board = StatusBoard(region, rank=rank, num_ranks=num_ranks, look_around=look_around)
    common, own = random.Random(seed), random.Random(f"{seed} {rank}")
    wrong = 0
    for _ in range(num_steps):
        for _ in range(common.randint(0, 4)):
            has_message = common.random() < 0.5
            delay(own)
            heard = board.announce(has_message) if rank == 0 else board.announced()
            wrong += heard != has_message
        board.barrier()
    return wrong


def halt_at(
    rank: int,
    num_ranks: int,
    region: SharedRegion,
    look_around: Callable[[float], None],
    seed: int,
) -> int:
    """Cross barriers until rank 0 wants to stop; returns after how many this rank did."""
    board = StatusBoard(region, rank=rank, num_ranks=num_ranks, look_around=look_around)
    dice = random.Random(f"{seed} {rank}")
    last = random.Random(seed).randrange(1, 50)
    if rank == 0:
        board.wants_halt = lambda: num_crossed >= last
    num_crossed = 0
    while not board.is_halted:
        delay(dice)
        board.barrier()
        num_crossed += 1
    return num_crossed


# --- the exchange --------------------------------------------------------------------------------

SHAPES = ((7, 5), (64,), (3, 1, 2), (1,))


def make_spec(num_ranks: int, num_shares: int) -> ExchangeSpec:
    tensors = tuple(
        TensorSpec(f"tensor {number}", shape, torch.empty(shape).stride(), torch.float32)
        for number, shape in enumerate(SHAPES)
    )
    gradients = GradientSpec(num_shares=num_shares, tensors=tensors, row_limits=(0,) * len(tensors))
    ranks = tuple(replica_of_share(share, num_ranks, num_shares) for share in range(num_shares))
    group = GroupSpec(
        ranks=tuple(range(num_ranks)), gradients=gradients, row_ranks=ranks, shares_per_row=1
    )
    return ExchangeSpec(num_ranks=num_ranks, share_ranks=ranks, groups=(group,), row_capacity=5)


def make_gradients(share: int, step: int) -> Gradients:
    """Of very different sizes, so that sums depend on their order; and not all are used."""
    generator = torch.Generator().manual_seed(1000 * step + share)
    return [
        None
        if (number + share + step) % 3 == 0 or number == 3
        else torch.randn(shape, generator=generator) * 10.0 ** ((share * 5) % 7)
        for number, shape in enumerate(SHAPES)
    ]


def exchange_gradients(
    rank: int,
    num_ranks: int,
    region: SharedRegion,
    look_around: Callable[[float], None],
    num_shares: int,
    num_steps: int,
    seed: int,
) -> list[list[Tensor | None]]:
    """Steps with random delays; every step's whole summed gradients as this rank sees them."""
    spec = make_spec(num_ranks, num_shares)
    board = StatusBoard(region, rank=rank, num_ranks=num_ranks, look_around=look_around)
    exchange = Exchange(spec, region, board=board, rank=rank)
    mine = elementwise_slices(spec.groups[0].gradients.extents, num_ranks, num_shares)[rank]
    dice = random.Random(f"{seed} {rank}")
    steps = []
    for step in range(num_steps):
        exchange.begin_pass()
        for share in range(num_shares):
            if spec.share_ranks[share] == rank:
                delay(dice)
                exchange.write(0, share, make_gradients(share, step))
                exchange.write_loss(share, float(share), 1.0)
        totals = exchange.collect(num_shares)
        assert totals.totals == [float(share) for share in range(num_shares)]
        delay(dice)
        exchange.gradients[0].reduce_scatter(mine)
        exchange.barrier()
        summed = [exchange.gradients[0].summed(number) for number in range(len(SHAPES))]
        steps.append([None if total is None else total.clone() for total in summed])
        exchange.barrier()
    return steps


def exchange_rows(
    rank: int,
    num_ranks: int,
    region: SharedRegion,
    look_around: Callable[[float], None],
    num_rounds: int,
    seed: int,
) -> int:
    """Rows of one share per rank; returns how often the gathered rows were not all ranks' own."""
    spec = make_spec(num_ranks, num_ranks)
    board = StatusBoard(region, rank=rank, num_ranks=num_ranks, look_around=look_around)
    exchange = Exchange(spec, region, board=board, rank=rank)
    dice = random.Random(f"{seed} {rank}")
    wrong = 0
    for number in range(num_rounds):
        if number % 10 == 0:
            exchange.barrier()
            exchange.begin_pass()
        delay(dice)
        length = 1 + number % 5
        exchange.offer(rank, torch.full((length,), 100.0 * number + rank).double(), last=True)
        rows = exchange.offered(rank, length, num_ranks)
        expected = [[100.0 * number + other] * length for other in range(num_ranks)]
        wrong += rows.tolist() != expected
    return wrong


# --- control -------------------------------------------------------------------------------------


def converse(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    """A helper's part of ``lead``."""
    num_ranks, num_rounds = pickle.loads(body)
    control = FollowerControl(context, context.rank, num_ranks)
    dice = random.Random(context.rank)
    for _ in range(num_rounds):
        said = control.broadcast(None)
        delay(dice)
        assert control.gather((context.rank, os.getpid(), said)) == []
    return b""


def lead(team: Team, objects: list[Any]) -> list[list[Any]]:
    """Say each object to all, and gather what each rank has heard."""
    num_ranks = team.num_helpers + 1
    team.call(
        converse,
        pickle.dumps((num_ranks, len(objects))),
        position=lambda rank: "in a test",
        timeout_seconds=TIMEOUT_SECONDS,
    )
    control = LeaderControl(team, TIMEOUT_SECONDS)
    heard = []
    for said in objects:
        assert control.broadcast(said) is said
        heard.append(control.gather((0, os.getpid(), said)))
    team.finish(TIMEOUT_SECONDS)
    return heard


# --- calls ---------------------------------------------------------------------------------------


def echo(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    context.send(body)
    for descriptor in descriptors:
        os.close(descriptor)
    return b""


def talk_and_fail(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    """Rank 1 sends data and then fails, the others wait for what never comes."""
    context.send(b"data")
    if context.rank == 1:
        raise ValueError("after the data")
    context.receive()
    return b""


def print_and_return(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    print(body.decode(), end="")  # noqa: T201  # no end of line: only a flush brings it out
    return b""


def ignore_data(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    """Says that it is there; rank 1 then reads nothing for a while."""
    context.send(b"")
    if context.rank == 1:
        time.sleep(float(body))
    for _ in range(3):
        context.receive()
    return b""


def print_variable(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    print(os.environ[body.decode()])  # noqa: T201
    return b""


def raise_error(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    raise ArithmeticError("as the test wants")


def tell_modules(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    context.send(str(body.decode() in sys.modules).encode())
    return b""
