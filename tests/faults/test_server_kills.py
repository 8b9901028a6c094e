"""Workers and parameter servers that are killed: training ends, and every sample counts once.

The gradients of these models do not depend on the weights, so that the sum of all updates is known
whoever has computed them, and with a single worker, whose batches come in their order, so are the
bits of any optimizer's.
"""

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.parallel.second_copy import SecondCopy
from lockstep.parallel.served_worker import ServedWorker
from lockstep.train.updaters import TorchUpdater
from tests.thorough import core_of

SAMPLES, BATCH = 400, 10


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rank_of_helper() -> int | None:
    """In a helper."""
    name, _, rank = Path("/proc/self/comm").read_text().strip().partition(":")
    return int(rank) if name == "lockstep" and rank else None


def death_in(folder: Path, deaths: Collection[str]) -> str | None:
    """The name of one of these that is still to be died, which nobody else dies then."""
    for one in sorted(folder.iterdir()):
        if one.name.partition("-")[2] not in deaths:
            continue
        with suppress(FileNotFoundError):
            one.unlink()
            return one.name.partition("-")[2]
    return None


class Linear(nn.Module):
    """Its parameters' gradients are sums of what it is given.

    Args:
        folder: of deaths, a file for each: its name says of whom, or where in an update.
        log: gets a byte for every forward pass.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weight = nn.Parameter(torch.randn(30, 7, dtype=torch.float64, generator=generator))
        self.bias = nn.Parameter(torch.randn(7, dtype=torch.float64, generator=generator))
        self.folder, self.log, self.calls = folder, log, 0

    def forward(self, inputs: Tensor) -> Tensor:
        with self.log.open("ab") as log:
            log.write(b".")
        self.calls += 1
        is_worker = rank_of_helper() is not None and self.training
        if self.training and not is_worker:
            time.sleep(0.004)  # so that the others get their turn
        if is_worker and self.calls % 7 == 0 and death_in(self.folder, ["worker"]):
            die()
        return torch.as_tensor((inputs @ self.weight + self.bias).sum(1))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if rank_of_helper() is not None:
            die_in_updates(self.folder)


def die_in_updates(folder: Path) -> None:
    """On a server every other update looks for a death, and dies it where it says."""
    apply = ServedWorker._apply
    calls = 0

    def applied(self: Any, step: int, total: Any) -> None:
        nonlocal calls
        calls += 1
        phase = death_in(folder, WHERE) if calls % 2 == 0 else None
        if phase is not None:
            WHERE[phase]()
        apply(self, step, total)
        if phase is not None:
            die()

    ServedWorker._apply = applied  # type: ignore[method-assign]


def before(kind: Any, name: str) -> None:
    setattr(kind, name, lambda *arguments, **options: die())


def after(kind: Any, name: str) -> None:
    act = getattr(kind, name)

    def acted(*arguments: Any) -> None:
        act(*arguments)
        die()

    setattr(kind, name, acted)


def half_copied(self: SecondCopy, gradients: Any) -> None:
    first = next(iter(self._pairs.values()))[0]
    first.copy[: len(first.copy) // 2] = 7.0
    die()


def nothing() -> None:
    return


WHERE: dict[str, Callable[[], None]] = {
    "update": partial(before, TorchUpdater, "step"),
    "commit": partial(after, TorchUpdater, "step"),
    "copy": lambda: setattr(SecondCopy, "follow", half_copied),
    "done": partial(after, SecondCopy, "follow"),
    "idle": nothing,
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 30, dtype=torch.float64, generator=generator)
    return inputs, torch.rand(SAMPLES, dtype=torch.float64, generator=generator)


def weighted(outputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return (outputs * weights).sum(), weights.sum()


def fit(
    folder: Path, deaths: list[str], strategy: Any, optimizer: Any, **options: Any
) -> tuple[lockstep.Trainer, lockstep.History, int]:
    """Train; how many forward passes it took, too."""
    (folder / "deaths").mkdir()
    for number, death in enumerate(deaths):
        (folder / "deaths" / f"{number:03}-{death}").touch()
    log = folder / "log"
    log.touch()
    trainer = lockstep.Trainer(
        Linear(folder / "deaths", log),
        loss=weighted,
        optimizer=optimizer,
        strategy=strategy,
        precision="fp64",
    )
    history = trainer.fit(data(), batch_size=BATCH, shuffle=False, verbose=0, **options)
    assert not list((folder / "deaths").iterdir()), "not all deaths were died"
    return trainer, history, log.stat().st_size


def plain(folder: Path, optimizer_of: Any, epochs: int) -> tuple[nn.Module, Any, list[float]]:
    model = Linear(folder, folder / "plain")
    optimizer = optimizer_of(model.parameters())
    inputs, weights = data()
    losses = []
    for _ in range(epochs):
        totals = []
        for start in range(0, SAMPLES, BATCH):
            rows = slice(start, start + BATCH)
            total, weight = weighted(model(inputs[rows]), weights[rows])
            optimizer.zero_grad()
            (total / weight).backward()
            optimizer.step()
            totals.append(total.item())
        losses.append(sum(totals) / weights.sum().item())
    return model, optimizer, losses


def assert_equal(one: Any, other: Any) -> None:
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    assert (one - other).norm() <= 1e-12 * max(float(other.norm()), 1.0)


def assert_as(trainer: lockstep.Trainer, model: nn.Module, optimizer: Any) -> None:
    for own, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert_equal(own.detach(), expected.detach())
        found, slots = trainer.optimizer.state[own], optimizer.state[expected]
        assert found.keys() == slots.keys()
        for slot, value in slots.items():
            assert_equal(found[slot], value)


@pytest.mark.parametrize(("kills", "staleness"), core_of([(6, 4), (50, 4), (50, None)], [(6, 4)]))
def test_workers_die_and_no_sample_counts_twice(
    kills: int, staleness: int | None, tmp_path: Path
) -> None:
    epochs = 2 + kills // 5
    sgd = partial(torch.optim.SGD, lr=0.1)
    strategy = lockstep.ParameterServerStrategy(2, 3, staleness)
    trainer, history, passes = fit(
        tmp_path, ["worker"] * kills, strategy, sgd, epochs=epochs, restarts=kills
    )
    model, optimizer, _ = plain(tmp_path, sgd, epochs)
    assert_as(trainer, model, optimizer)
    assert 1 <= len(history.restarts) <= kills  # two may die before it is seen
    # Had the epoch begun anew each time, there would be many more.
    parts = epochs * SAMPLES // BATCH * 3
    assert passes - parts <= 20 * (kills + 1)


OPTIMIZERS: dict[str, Any] = {
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "still": partial(torch.optim.SGD, lr=0.0),
}


@pytest.mark.parametrize(
    ("name", "times"),
    core_of(
        [("Adam", 1), *((name, 4) for name in OPTIMIZERS), ("still", 1)],
        [("Adam", 1), ("still", 1)],
    ),
)
def test_servers_die_in_every_phase_and_their_copies_take_over(
    name: str, times: int, tmp_path: Path
) -> None:
    """With one worker batches come in order: weights and slots are those of one device."""
    epochs = 2
    strategy = lockstep.ParameterServerStrategy(2, 1, 2, replicas=2)
    deaths = [*WHERE] * times
    trainer, history, passes = fit(tmp_path, deaths, strategy, OPTIMIZERS[name], epochs=epochs)
    model, optimizer, losses = plain(tmp_path, OPTIMIZERS[name], epochs)
    assert_as(trainer, model, optimizer)
    assert 1 <= len(history.restarts) <= len(deaths)  # both may die at once
    if name == "still":  # else a batch's loss is that of the weights that it was computed with
        assert_equal(history.history["loss"], losses)
    assert passes - epochs * SAMPLES // BATCH <= 10 * (len(deaths) + 1)
