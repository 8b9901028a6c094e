"""Bad records: named on all ranks, or left out on all alike, as one device would leave them out."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep.data.order import epoch_batches
from lockstep.errors import BadRecordError, DataError, OptionError
from tests.launchers import BEGINNING, lines_of_all, on_loopback
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

SAMPLES, BATCH, EPOCHS, SEED = 26, 8, 2, 3
UNREADABLE = (0, 3, 11, 24, 25)
MISSHAPEN = {5: (7,), 12: (2, 6)}
MISTYPED = (13,)
BAD = {*UNREADABLE, *MISSHAPEN, *MISTYPED}
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(SAMPLES, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (SAMPLES,), generator=GENERATOR)

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: None,
    "mirrored": lambda: lockstep.MirroredStrategy(2),
    "shares": lambda: lockstep.MirroredStrategy(2, num_shares=4),
    "gloo": lambda: lockstep.MirroredStrategy(2, engine="gloo"),
    "pipeline": lambda: lockstep.PipelineStrategy(2, cuts=["1"], microbatches=2),
    "hybrid": lambda: lockstep.HybridStrategy(data=2, pipe=2, cuts=["1"], microbatches=2),
}


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Some of which are bad.

    Args:
        bad: numbers of those.
    """

    def __init__(self, bad: set[int] = BAD) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = X[index]
        if index in self.bad and index in UNREADABLE:
            raise OSError(f"sector {index} is damaged")
        if index in self.bad and index in MISSHAPEN:
            x = torch.ones(MISSHAPEN[index])
        return (x.float() if index in self.bad and index in MISTYPED else x), Y[index]


class Batched(Rows):
    """Read batch by batch."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


class Noisy(Rows):
    """Draws random numbers."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.rand(()), y


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_trainer(strategy: str, model: nn.Module | None = None) -> lockstep.Trainer:
    return lockstep.Trainer(
        model or make_model(),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=STRATEGIES[strategy](),
        precision="fp64",
        seed=SEED,
    )


def fit(trainer: lockstep.Trainer, data: Any, **options: Any) -> lockstep.History:
    options = {"on_bad_record": "skip", "epochs": EPOCHS, "batch_size": BATCH, **options}
    return trainer.fit(data, verbose=0, **options)


def plain_loop() -> tuple[nn.Module, list[float]]:
    """One device without Lockstep, which leaves the same samples out."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(EPOCHS):
        total, count = 0.0, 0
        for indices in epoch_batches(SEED, epoch, SAMPLES, BATCH, shuffle=True):
            good = [index for index in indices.tolist() if index not in BAD]
            if not good:
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(X[good]), Y[good])
            loss.backward()
            optimizer.step()
            total, count = total + len(good) * loss.item(), count + len(good)
        losses.append(total / count)
    return model, losses


DATA: dict[str, Callable[[], Any]] = {
    "rows": Rows,
    "batched": Batched,
    "thread": lambda: lockstep.data.prefetch(Rows()),
    "process": lambda: lockstep.data.prefetch(Rows(), workers=1),
    "cache": lambda: lockstep.data.cache(Rows()),
    "cache ahead": lambda: lockstep.data.prefetch(lockstep.data.cache(Rows())),
}
CELLS = [(strategy, "rows") for strategy in STRATEGIES] + [("mirrored", data) for data in DATA]


@pytest.mark.parametrize(
    ("strategy", "data"),
    core_of(
        list(dict.fromkeys(CELLS)),
        [("single", "rows"), ("mirrored", "thread"), ("pipeline", "rows"), ("mirrored", "cache")],
        [("shares", "rows")],
    ),
)
def test_bad_records_are_left_out(strategy: str, data: str) -> None:
    expected, losses = plain_loop()
    trainer = make_trainer(strategy)
    history = fit(trainer, DATA[data]())
    assert history.history["bad_records"] == [len(BAD)] * EPOCHS
    assert history.history["loss"] == pytest.approx(losses, rel=1e-12)
    wanted = dict(expected.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        assert torch.dist(parameter, wanted[name]) <= 1e-12 * wanted[name].norm()
    trainer.close()


def test_validation_leaves_them_out_too() -> None:
    trainer = make_trainer("mirrored")
    history = fit(trainer, (X, Y), validation_data=Rows(), epochs=1)
    good = [index for index in range(SAMPLES) if index not in BAD]
    assert history.history["val_bad_records"] == [len(BAD)]
    loss = trainer.evaluate((X[good], Y[good]), batch_size=BATCH)["loss"]
    assert history.history["val_loss"] == pytest.approx([loss], rel=1e-12)


def test_dropout_and_augmentation_draw_the_same() -> None:
    """On other ranks, of processes that read ahead, and after a batch that was read anew."""

    def trained(strategy: str, data: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        trainer = make_trainer(strategy, model)
        fit(trainer, data)
        trainer.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    one = lockstep.MirroredStrategy(1, num_shares=4)
    STRATEGIES["one"] = lambda: one
    found = [trained("one", Noisy()), trained("shares", Noisy())]
    found.append(trained("shares", lockstep.data.prefetch(Noisy(), workers=1)))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_checkpoints_keep_the_count(tmp_path: Path) -> None:
    class Stop(lockstep.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise InterruptedError

    checkpoint = lockstep.Checkpoint(tmp_path / "run", every="1 steps")
    whole = make_trainer("mirrored")
    expected = fit(whole, Rows()).history
    trainer = make_trainer("mirrored")
    trainer.callbacks.append(Stop())
    with pytest.raises(InterruptedError):
        fit(trainer, Rows(), checkpoint=checkpoint)
    again = make_trainer("mirrored")
    assert fit(again, Rows(), checkpoint=checkpoint).history == expected
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_they_are_named_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer("single").fit(Rows({3}), batch_size=BATCH, on_bad_record="skip")
    shown = " ".join(capsys.readouterr().out.split())
    assert "Skipped sample 3: Sample 3 of the dataset (Rows) cannot be read." in shown
    assert "bad_records 1" in shown


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", core_of(["rows", "batched", "thread", "process"], ["batched"]))
@pytest.mark.parametrize("bad", [3, 12])
def test_an_error_names_dataset_index_and_rank(bad: int, data: str) -> None:
    """On whichever rank it is; what waits for it hears of it at once."""
    for rank in (0, 1):
        trainer = make_trainer("mirrored")
        trainer.seed = seed_for(bad, rank)
        source = {**DATA, "rows": Rows, "batched": Batched}[data]()
        inner = source if isinstance(source, Rows) else source.dataset
        inner.bad = {bad}
        began = time.monotonic()
        with pytest.raises(BadRecordError) as caught:
            fit(trainer, source, on_bad_record="error")
        assert time.monotonic() - began < 30  # on a busy machine; else a moment
        assert caught.value.index == bad
        assert f"ample {bad} " in str(caught.value)
        assert caught.value.rank == rank
        assert f"Rank {rank} was reading" in str(caught.value)
        assert type(inner).__name__ in str(caught.value)
        trainer.close()


def seed_for(index: int, rank: int) -> int:
    """With which this rank of two reads the sample in a full batch."""

    def is_read(seed: int) -> bool:
        batches = [*epoch_batches(seed, 0, SAMPLES, BATCH, shuffle=True)][:-1]
        half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        return any(index in batch[half].tolist() for batch in batches)

    return next(filter(is_read, range(100)))


def test_nothing_but_bad_records() -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            raise OSError

    with pytest.raises(DataError, match="must have some good ones"):
        fit(make_trainer("single"), Broken())


def test_what_is_bad_by_chance_is_an_error() -> None:
    class Fragile(Rows):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
            if len(indices) > 1 and 3 in indices:
                raise OSError("only together")
            return [self[index] for index in indices]

    with pytest.raises(BadRecordError, match="only together"):
        fit(make_trainer("mirrored"), Fragile(set()))


@pytest.mark.parametrize("received", ["drop", None])
def test_what_cannot_be_asked(received: Any) -> None:
    with pytest.raises(OptionError, match="on_bad_record"):
        fit(make_trainer("single"), (X, Y), on_bad_record=received)


def test_what_cannot_be_skipped() -> None:
    def batches() -> Any:
        yield X, Y

    with pytest.raises(OptionError, match="can only be iterated"):
        fit(make_trainer("single"), batches, batch_size=None)
    trainer = make_trainer("single")
    trainer.strategy = lockstep.LocalSGDStrategy(2, devices=2)
    with pytest.raises(OptionError, match="replicas that train apart"):
        fit(trainer, Rows())


ON_HOSTS = f"""{BEGINNING}
from lockstep.errors import OptionError

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 4:
            raise OSError("damaged")
        return torch.ones(3), torch.ones(1)

trainer = lockstep.Trainer(
    nn.Linear(3, 1), loss=nn.MSELoss(), optimizer=torch.optim.SGD,
    strategy=lockstep.MultiWorkerMirroredStrategy())
try:
    trainer.fit(Rows(), batch_size=4, verbose=0, on_bad_record="skip")
except OptionError as error:
    tell(str(error))
"""


@pytest.mark.exhaustive
def test_on_several_hosts_they_are_refused_before_samples_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(ON_HOSTS)
    with on_loopback([str(path)]) as processes:
        for told in lines_of_all(processes, 120):
            assert "with several hosts" in told[0]
