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
import torchmetrics
from torch import Tensor, nn

import lockstep
from lockstep.errors import WorkerError
from lockstep.parallel.parameter_server.server import ParameterServer
from lockstep.parallel.parameter_server.update_rollback import SecondCopy
from lockstep.train.optim.updaters import TorchUpdater
from tests.thorough import core_of

SAMPLES, BATCH = 400, 10


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rank_of_helper() -> int | None:
    """In a helper."""
    name, _, rank = Path("/proc/self/comm").read_text().strip().partition(":")
    return int(rank) if name == "lockstep" and rank else None


def death_in(folder: Path, deaths: Collection[str], *, takes: bool = True) -> str | None:
    """The name of one of these that is still to be died, which nobody else dies if it is taken."""
    for one in sorted(folder.iterdir()):
        if one.name.partition("-")[2] not in deaths:
            continue
        with suppress(FileNotFoundError):
            if takes:
                one.unlink()
            return one.name.partition("-")[2]
    return None


class Linear(nn.Module):
    """Its parameters' gradients are sums of what it is given.

    Args:
        folder: of deaths, a file for each: its name says of whom, or where in an update.
        log: gets a byte for every forward pass.
        has_rows: a sparse embedding, of which a batch touches some rows, is trained, too.
    """

    def __init__(self, folder: Path, log: Path, *, has_rows: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weight = nn.Parameter(torch.randn(30, 7, dtype=torch.float64, generator=generator))
        self.bias = nn.Parameter(torch.randn(7, dtype=torch.float64, generator=generator))
        self.rows = nn.Embedding(90, 3, sparse=True, dtype=torch.float64)
        self.rows.weight.data.normal_(generator=generator)
        self.rows.requires_grad_(has_rows)
        self.folder, self.log, self.calls = folder, log, 0

    def forward(self, inputs: Tensor) -> Tensor:
        with self.log.open("ab") as log:
            log.write(b".")
        self.calls += 1
        is_worker = rank_of_helper() is not None and self.training
        if self.training and not is_worker:
            # so that the others get their turn, which those that are still to die need
            time.sleep(0.05 if death_in(self.folder, ["worker"], takes=False) else 0.004)
        if is_worker and self.calls % 7 == 0 and death_in(self.folder, ["worker"]):
            die()
        rows = self.rows((inputs[:, 0] * 10).long() % 70).sum(1)
        return torch.as_tensor((inputs @ self.weight + self.bias).sum(1) + rows)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if rank_of_helper() is not None:
            die_in_updates(self.folder)


def die_in_updates(folder: Path) -> None:
    """On a server every other update looks for a death, and dies it where it says."""
    apply = ParameterServer._apply
    calls = 0

    def applied(self: Any, step: int, total: Any) -> None:
        nonlocal calls
        calls += 1
        phase = death_in(folder, WHERE) if calls % 2 == 0 else None
        if phase is not None:
            WHERE[phase]()
        apply(self, step, total)
        if phase is not None and phase != "forget":
            die()

    ParameterServer._apply = applied  # type: ignore[method-assign]
    die_in_steps(folder)


def die_in_steps(folder: Path) -> None:
    """The same where workers wait: there every third update of a server does."""
    step, calls = TorchUpdater.step, 0

    def stepped(self: Any) -> None:
        nonlocal calls
        step(self)
        calls += bool(self._pieces)
        if calls % 3 == 2 and self._pieces and death_in(folder, ["step"]):
            die()

    TorchUpdater.step = stepped  # type: ignore[method-assign]


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
    "forget": lambda: setattr(SecondCopy, "follow", lambda *arguments: None),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 30, dtype=torch.float64, generator=generator)
    return inputs, torch.rand(SAMPLES, dtype=torch.float64, generator=generator)


def weighted(outputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return (outputs * weights).sum(), weights.sum()


def fit(
    folder: Path,
    deaths: list[str],
    strategy: Any,
    optimizer: Any,
    *,
    has_rows: bool = False,
    metrics: Any = None,
    **options: Any,
) -> tuple[lockstep.Trainer, lockstep.History, int]:
    """Train; how many forward passes it took, too."""
    (folder / "deaths").mkdir()
    for number, death in enumerate(deaths):
        (folder / "deaths" / f"{number:03}-{death}").touch()
    log = folder / "log"
    log.touch()
    trainer = lockstep.Trainer(
        Linear(folder / "deaths", log, has_rows=has_rows),
        loss=weighted,
        optimizer=optimizer,
        strategy=strategy,
        precision="fp64",
        metrics=metrics,
    )
    history = trainer.fit(data(), batch_size=BATCH, shuffle=False, verbose=0, **options)
    assert not list((folder / "deaths").iterdir()), "not all deaths were died"
    return trainer, history, log.stat().st_size


def plain(
    folder: Path, optimizer_of: Any, epochs: int, *, has_rows: bool = False
) -> tuple[nn.Module, Any, list[float]]:
    model = Linear(folder, folder / "plain", has_rows=has_rows)
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
        found, slots = trainer.optimizer.state.get(own, {}), optimizer.state.get(expected, {})
        assert found.keys() == slots.keys()
        for slot, value in slots.items():
            assert_equal(found[slot], value)


@pytest.mark.thorough
@pytest.mark.parametrize(("kills", "staleness"), core_of([(6, 4), (20, None)], [(6, 4)], []))
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
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


@pytest.mark.parametrize(
    ("name", "times"),
    core_of(
        [("Adam", 1), *((name, 4) for name in OPTIMIZERS), ("still", 1), ("Adagrad", 1)],
        [("Adam", 1)],
        [("momentum", 4)],
    ),
)
def test_servers_die_in_every_phase_and_their_copies_take_over(
    name: str, times: int, tmp_path: Path
) -> None:
    """With one worker batches come in order: weights and slots are those of one device."""
    epochs = 2
    strategy = lockstep.ParameterServerStrategy(2, 1, 2, replicas=2)
    deaths = [death for death in WHERE if death != "forget"] * times
    make, rows = OPTIMIZERS[name], {"has_rows": name == "Adagrad"}
    trainer, history, passes = fit(tmp_path, deaths, strategy, make, epochs=epochs, **rows)
    model, optimizer, losses = plain(tmp_path, make, epochs, **rows)
    assert_as(trainer, model, optimizer)
    assert 1 <= len(history.restarts) <= len(deaths)  # both may die at once
    if name == "still":  # else a batch's loss is that of the weights that it was computed with
        assert_equal(history.history["loss"], losses)
    assert passes - epochs * SAMPLES // BATCH <= 10 * (len(deaths) + 1)


@pytest.mark.thorough
def test_with_metrics_the_epoch_begins_anew(tmp_path: Path) -> None:
    """What a worker's metrics have seen is lost with it: the epoch's beginning is gone back to."""
    strategy = lockstep.ParameterServerStrategy(2, 1, 2, replicas=2)
    make, seen = OPTIMIZERS["still"], []
    for number, deaths in enumerate(([], ["update", "copy"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        metrics = {"mse": torchmetrics.MeanSquaredError()}
        trainer, history, _ = fit(folder, deaths, strategy, make, metrics=metrics, epochs=2)
        assert bool(history.restarts) == bool(deaths)
        seen.append(history.history)
    model, optimizer, losses = plain(tmp_path, make, 2)
    assert_as(trainer, model, optimizer)
    assert_equal(history.history["loss"], losses)
    assert seen[0].keys() == seen[1].keys()
    for name in seen[0]:
        if name != "staleness":
            assert_equal(seen[0][name], seen[1][name])


def test_copies_that_differ_are_an_error(tmp_path: Path) -> None:
    strategy = lockstep.ParameterServerStrategy(1, 1, 1, replicas=2)
    with pytest.raises(
        WorkerError, match=r"two copies of what server 0 updates differ, in bias, weight"
    ):
        fit(tmp_path, ["forget"], strategy, OPTIMIZERS["momentum"])


@pytest.mark.parametrize("kills", core_of([3, 20], [3], []))
def test_servers_that_die_change_no_bit_where_workers_wait(kills: int, tmp_path: Path) -> None:
    trained = []
    for number, deaths in enumerate((0, kills)):
        folder = tmp_path / str(number)
        folder.mkdir()
        strategy = lockstep.ParameterServerStrategy(2, 2, 0, replicas=2)
        trainer, history, _ = fit(folder, ["step"] * deaths, strategy, OPTIMIZERS["Adam"], epochs=2)
        assert min(deaths, 1) <= len(history.restarts) <= deaths
        trained.append((trainer, history))
    (still, calm), (other, shaken) = trained
    assert calm.history == shaken.history
    for own, expected in zip(other.model.parameters(), still.model.parameters(), strict=True):
        assert torch.equal(own, expected)
        slots = still.optimizer.state.get(expected, {})
        assert all(torch.equal(other.optimizer.state[own][slot], slots[slot]) for slot in slots)


@pytest.mark.parametrize("staleness", core_of([0, 2, None], [2]))
def test_without_a_second_copy_the_error_says_what_is_left(
    staleness: int | None, tmp_path: Path
) -> None:
    strategy = lockstep.ParameterServerStrategy(1, 2, staleness)
    deaths = ["step" if staleness == 0 else "update"]
    with pytest.raises(WorkerError, match=r"Rank 2 .* ended") as caught:
        fit(tmp_path, deaths, strategy, OPTIMIZERS["Adam"])
    assert any("The weights " in note for note in caught.value.__notes__)


@pytest.mark.thorough
@pytest.mark.parametrize("staleness", core_of([0, 2, None], [2], []))
def test_without_a_second_copy_the_newest_checkpoint_is_taken(
    staleness: int | None, tmp_path: Path
) -> None:
    """By the next call of ``fit``, or by this one where it may restart, as under all strategies."""
    kept = lockstep.Checkpoint(tmp_path / "kept", every="epoch")
    strategy = lockstep.ParameterServerStrategy(1, 1, staleness)
    death = "step" if staleness == 0 else "update"
    trained = []
    for restarts in (0, 1):
        folder = tmp_path / str(restarts)
        folder.mkdir()
        options: dict[str, Any] = {"epochs": 3, "restarts": restarts}
        if restarts:
            trainer, _, _ = fit(folder, [death], strategy, OPTIMIZERS["Adam"], **options)
        else:
            with pytest.raises(WorkerError, match=r"Rank 1 .* ended"):
                fit(folder, [death], strategy, OPTIMIZERS["Adam"], checkpoint=kept, **options)
            (folder / "again").mkdir()
            again = folder / "again"
            trainer, _, _ = fit(again, [], strategy, OPTIMIZERS["Adam"], checkpoint=kept, **options)
        trained.append(trainer)
    model, optimizer, _ = plain(tmp_path, OPTIMIZERS["Adam"], 3)
    for trainer in trained:
        assert_as(trainer, model, optimizer)
