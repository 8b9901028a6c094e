"""Data whose samples are not first: the weights are those of a plain loop on whole batches."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Generator, Tensor, nn

import lockstep
from lockstep.data.batch_dims import BatchDims
from lockstep.errors import LockstepError, ModelError, OptionError
from tests.thorough import core_of
from tests.zoo import build_seeded

pytestmark = pytest.mark.thorough

TIME, SAMPLES, FEATURES, BATCH = 4, 13, 6, 5


class Recurrent(nn.Module):
    """An LSTM, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.lstm(x)[0]))
        return found


class Attending(nn.Module):
    """A Transformer's encoder, time first, with a mask over time that belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.first(x), mask) + bias[:, None])
        return found


class Last(Recurrent):
    """One answer for each sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[-1]


def over_time(output: Tensor, target: Tensor) -> Tensor:
    assert output.shape[:2] == target.shape
    assert len(target) == TIME
    return F.cross_entropy(output.view(-1, output.shape[-1]), target.flatten())


def root(output: Tensor, target: Tensor) -> Tensor:
    """Of the whole batch: no mean."""
    assert len(output) == TIME
    return F.mse_loss(output.sum(-1), target.to(output)).sqrt()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=Generator().manual_seed(1), dtype=torch.float64)


X, Y = normal(TIME, SAMPLES, FEATURES), torch.arange(TIME * SAMPLES).reshape(TIME, SAMPLES) % 3
MASK = torch.zeros(TIME, TIME, dtype=torch.float64).masked_fill(
    torch.ones(TIME, TIME).triu(1).bool(), float("-inf")
)
ATTENDING = {
    "inputs": {"x": 1, "mask": None, "bias": None},
    "targets": 1,
    "outputs": 1,
}

Case = tuple[Callable[[], nn.Module], Any, Any, Any, Any]
CASES: dict[str, Case] = {
    "LSTM": (Recurrent, over_time, X, Y, 1),
    "whole batch": (Recurrent, root, X, Y, 1),
    "last step": (Last, F.cross_entropy, X, Y[0], {"inputs": 1}),
    "Transformer": (
        Attending,
        over_time,
        {"x": X, "mask": MASK, "bias": normal(TIME, 8)},
        Y,
        ATTENDING,
    ),
}
STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "mirrored 2": lambda: lockstep.MirroredStrategy(2),
    "mirrored 1, 3 shares": lambda: lockstep.MirroredStrategy(1, num_shares=3),
    "mirrored 3": lambda: lockstep.MirroredStrategy(3),
    "pipeline 2": lambda: lockstep.PipelineStrategy(2, microbatches=2),
    "hybrid 2 x 2": lambda: lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
}


def rows(tree: Any, part: slice, dim: int = 1) -> Any:
    """Some samples; of what belongs to none, all."""
    if isinstance(tree, dict):
        return {key: rows(one, part) if key == "x" else one for key, one in tree.items()}
    return tree[(slice(None),) * min(dim, tree.dim() - 1) + (part,)]


def plain(case: Case) -> dict[str, Tensor]:
    make, loss, inputs, targets, _ = case
    model = build_seeded(make).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, SAMPLES, BATCH):
        part = slice(start, start + BATCH)
        batch = rows(inputs, part)
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        optimizer.zero_grad()
        loss(output, rows(targets, part)).backward()
        optimizer.step()
    return model.state_dict()


def trainer_of(case: Case, strategy: lockstep.Strategy | None, **options: Any) -> lockstep.Trainer:
    make, loss, _, _, dims = case
    return lockstep.Trainer(
        build_seeded(make).double(),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=strategy,
        precision="fp64",
        batch_dim=dims,
        **options,
    )


def assert_trained(case: Case, trainer: lockstep.Trainer) -> None:
    wanted = plain(case)
    for name, value in trainer.model.state_dict().items():
        assert (value - wanted[name]).norm() <= 1e-12 * wanted[name].norm(), name


@pytest.mark.parametrize(
    ("name", "strategy"),
    core_of(
        [(name, strategy) for name in CASES for strategy in STRATEGIES],
        [
            *((name, "mirrored 1, 3 shares") for name in CASES),
            ("LSTM", "pipeline 2"),
            ("Transformer", "mirrored 2"),
        ],
    ),
)
def test_time_first(name: str, strategy: str) -> None:
    case = CASES[name]
    inputs, targets = case[2:4]
    trainer = trainer_of(case, STRATEGIES[strategy]())
    try:
        trainer.fit((inputs, targets), batch_size=BATCH, shuffle=False, verbose=0)
        assert_trained(case, trainer)
        model = trainer.model.eval()
        with torch.no_grad():
            wanted = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        found = trainer.predict(inputs, batch_size=BATCH)
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
        loss = trainer.evaluate((inputs, targets), batch_size=SAMPLES)["loss"]
        assert loss == pytest.approx(case[1](wanted, targets).item(), abs=1e-12)
        is_whole = any("on the whole batch" in note for note in trainer.plan.notes)
        assert is_whole == (case[1] is root and trainer.plan.num_shares > 1)
    finally:
        trainer.close()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, SAMPLES, BATCH):
        part = slice(start, start + BATCH)
        yield rows(X, part), rows(Y, part)


def test_a_stream() -> None:
    case = CASES["LSTM"]
    trainer = trainer_of(case, lockstep.MirroredStrategy(1, num_shares=3))
    trainer.fit(batches, verbose=0)
    assert_trained(case, trainer)


def own_step(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return over_time(model(inputs), targets)


def test_a_step_of_ones_own() -> None:
    case = CASES["LSTM"]
    trainer = trainer_of(
        (case[0], None, *case[2:]), STRATEGIES["mirrored 1, 3 shares"](), train_step=own_step
    )
    trainer.fit((X, Y), batch_size=BATCH, shuffle=False, verbose=0)
    assert_trained(case, trainer)


class Sequences(torchmetrics.Metric):
    """Sees outputs as the model returns them."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        assert output.shape[:2] == target.shape == (TIME, output.shape[1])
        self.count += output.shape[1]

    def compute(self) -> Tensor:
        return self.count


def test_metrics() -> None:
    strategy = STRATEGIES["mirrored 1, 3 shares"]()
    trainer = trainer_of(CASES["LSTM"], strategy, metrics={"sequences": Sequences()})
    history = trainer.fit((X.numpy(), Y.tolist()), batch_size=BATCH, verbose=0).history
    assert history["sequences"] == [SAMPLES]


def test_what_is_not_where_it_was_said_to_be() -> None:
    trainer = trainer_of((*CASES["last step"][:4], 1), lockstep.MirroredStrategy(1, num_shares=3))
    with pytest.raises(LockstepError, match=r"along dim 1.*shape \(2, 3\).*'outputs': 0"):
        trainer.fit((X, Y[0]), batch_size=BATCH, verbose=0)
    trainer = trainer_of(CASES["Transformer"], None)
    with pytest.raises(LockstepError, match="Batches of a stream hold samples only"):
        trainer.fit(lambda: iter([({"x": X, "mask": MASK, "bias": MASK}, Y)]), verbose=0)


@pytest.mark.parametrize("wrong", [-1, True, None, "time", {"input": 1}, {"inputs": "x"}])
def test_what_is_no_dim(wrong: object) -> None:
    with pytest.raises(OptionError, match="`batch_dim` must be a dim"):
        BatchDims.of(wrong)


# --- proofs ---------------------------------------------------------------------------------------


def job_of(case: Case, **changes: Any) -> lockstep.Job:
    make, loss, inputs, targets, dims = case
    parts: dict[str, Any] = {
        "model": build_seeded(make),
        "loss": loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "data": (inputs, targets),
        "batch_size": BATCH,
        "batch_dim": dims,
    }
    return lockstep.Job(**{**parts, **changes})


@pytest.mark.parametrize(
    ("name", "strategy"),
    core_of(
        [(name, one) for name in CASES for one in ("mirrored 1, 3 shares", "pipeline 2")],
        [("LSTM", "mirrored 1, 3 shares"), ("Transformer", "pipeline 2")],
        [],
    ),
)
def test_a_proof(name: str, strategy: str) -> None:
    report = lockstep.verify(job_of(CASES[name]), STRATEGIES[strategy](), steps=4)
    assert report.passed, report


@pytest.mark.parametrize(
    "changes",
    [
        {"data": batches},
        {"loss": None, "train_step": lambda model, batch: over_time(model(batch[0]), batch[1])},
    ],
    ids=["a stream", "a step of one's own"],
)
def test_a_proof_of(changes: dict[str, Any]) -> None:
    report = lockstep.verify(job_of(CASES["LSTM"], **changes), STRATEGIES["mirrored 2"](), steps=4)
    assert report.passed, report


def test_a_proof_with_samples_elsewhere() -> None:
    """Time taken for samples: of parts of it, a recurrent net computes something else."""
    other = job_of(CASES["LSTM"], batch_dim=0, batch_size=TIME)
    with pytest.raises(ModelError, match="must not depend on the other samples"):
        lockstep.verify(other, STRATEGIES["mirrored 1, 3 shares"](), steps=1)
