"""Parameter servers: exact where workers wait, and no sample lost where they do not.

That ``staleness=0`` is one device is in the parity table. With workers some steps apart only a loss
whose gradients do not depend on the weights has the same result: there every sample must have
counted once, with its weight, whoever has computed it.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ModelError, OptionError
from lockstep.train.runtime import session
from tests.thorough import core_of
from tests.zoo import case, make_job

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 107, 10, 3

# Else torch's own optimizers warn that they do not check the sparse tensors that they make.
torch.sparse.check_sparse_tensor_invariants.disable()


class Sums(nn.Module):
    """Linear in its parameters: the gradient of its mean is the mean of what it is given.

    Args:
        seconds: that the first process sleeps in each forward pass.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(30, 7, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(7, dtype=torch.float64))
        self.first, self.seconds = os.getpid(), seconds

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and os.getpid() == self.first:
            time.sleep(self.seconds)
        sums: Tensor = (inputs @ self.weight + self.bias).sum(1)
        return sums


def weighted(outputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return (outputs * weights).sum(), weights.sum()


def sample_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 30, dtype=torch.float64, generator=generator)
    return inputs, torch.rand(NUM_SAMPLES, dtype=torch.float64, generator=generator)


def plain(epochs: int) -> Sums:
    """Each batch once, in one process."""
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, weights = sample_data()
    for _ in range(epochs):
        for start in range(0, NUM_SAMPLES, BATCH_SIZE):
            rows = slice(start, start + BATCH_SIZE)
            total, weight = weighted(model(inputs[rows]), weights[rows])
            optimizer.zero_grad()
            (total / weight).backward()
            optimizer.step()
    return model


def trained(
    strategy: Any, model: nn.Module, data: Any = None, restarts: int = 0, **options: Any
) -> lockstep.History:
    trainer = lockstep.Trainer(
        model,
        loss=weighted,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=strategy,
        precision="fp64",
        **options,
    )
    return trainer.fit(
        data or sample_data(),
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        shuffle=False,
        verbose=0,
        restarts=restarts,
    )


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, own), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (own - expected).norm() / expected.norm()
        assert difference <= 1e-12, f"{name}: {difference}"


@pytest.mark.parametrize(
    ("servers", "workers", "staleness"),
    core_of([(1, 1, 1), (1, 2, 1), (2, 3, 4), (2, 3, None), (1, 4, 2)], [(2, 3, 4), (2, 3, None)]),
)
@pytest.mark.parametrize("accumulate", core_of([1, 2], [1]))
def test_every_sample_counts_once(
    servers: int, workers: int, staleness: int | None, accumulate: int
) -> None:
    model = Sums(seconds=0.005)
    strategy = lockstep.ParameterServerStrategy(servers, workers, staleness)
    history = trained(strategy, model, accumulate=accumulate)
    assert_equal(model, plain(EPOCHS))
    leads = history.history["staleness"]
    assert len(leads) == EPOCHS
    assert all(lead <= (NUM_SAMPLES if staleness is None else staleness) for lead in leads)
    assert workers == 1 or max(leads) >= 1  # somebody was ahead


def counted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    return (outputs * weights).sum()


def stepped_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return counted_sum(model(batch[0]), batch[1])


class Rows(Sums):
    """Gives what is summed there, as logarithms of the probabilities of classes."""

    def forward(self, inputs: Tensor) -> Tensor:
        rows: Tensor = inputs @ self.weight + self.bias
        return rows


def counted_mean(outputs: Tensor, weights: Tensor) -> Tensor:
    """A mean over the samples that have a label: in each part of a batch of other numbers."""
    return F.nll_loss(outputs, (3 * weights).long() - 1, ignore_index=-1)


def stepped_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    counts = 1.0 + (batch[1] > 0.5)
    mean: Tensor = (model(batch[0]) * counts).sum() / counts.sum()
    return mean


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (Sums, {"loss": counted_sum}),
        (Sums, {"train_step": stepped_sum}),
        (Rows, {"loss": counted_mean}),
        (Sums, {"train_step": stepped_mean}),
    ],
)
@pytest.mark.parametrize("accumulate", core_of([1, 2], [1]))
def test_a_loss_of_the_batch_is_one_whoever_computes_its_parts(
    made: Callable[[], Sums], given: dict[str, Any], accumulate: int
) -> None:
    found, expected = made(), made()
    inputs, weights = sample_data()
    for model, strategy in (
        (found, lockstep.ParameterServerStrategy(2, 3, 4)),
        (expected, lockstep.SingleDeviceStrategy()),
    ):
        trainer = lockstep.Trainer(
            model,
            optimizer=partial(torch.optim.SGD, lr=1e-3),
            strategy=strategy,
            precision="fp64",
            accumulate=accumulate,
            **given,
        )
        trainer.fit((inputs, weights), batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    assert_equal(found, expected)


def test_validation_meets_after_workers_have_computed_unequal_numbers_of_parts() -> None:
    """A loss that is no mean is validated on the whole batch, which all workers bring together."""
    inputs, weights = sample_data()
    slow = Sums(seconds=0.01)  # on the first worker
    trainer = lockstep.Trainer(
        slow,
        loss=lambda outputs, weights: (outputs * weights).sum().sqrt(),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        strategy=lockstep.ParameterServerStrategy(1, 2, 4, timeout_seconds=60),
        precision="fp64",
    )
    slow.bias.data.fill_(9.0)
    data = inputs, weights
    history = trainer.fit(data, batch_size=NUM_SAMPLES // 4, verbose=0, validation_data=data)
    found = trainer.evaluate(data, batch_size=NUM_SAMPLES // 4)
    assert history.history["val_loss"] == [pytest.approx(found["loss"], rel=1e-12)]


def test_what_is_shown_at_every_step_holds_workers_together() -> None:
    """Then nobody is ahead, and the result is that of one device for any model."""
    one = case("mlp")
    assert isinstance(one.inputs, Tensor)
    strategy = lockstep.ParameterServerStrategy(1, 2, 4)
    for stream in (True, False):
        alone, apart = one.make_model().double(), one.make_model().double()
        for model, own in ((alone, lockstep.SingleDeviceStrategy()), (apart, strategy)):
            data: Any = one.inputs.double(), one.targets
            callbacks = (
                [] if stream else [lockstep.callbacks.LambdaCallback(on_train_batch_end=_see)]
            )
            sizes: dict[str, Any] = {"batch_size": one.batch_size}
            if stream:
                data, sizes = DataLoader(TensorDataset(*data), one.batch_size), {}
            trainer = lockstep.Trainer(
                model,
                loss=one.loss,
                optimizer=one.optimizer,
                strategy=own,
                precision="fp64",
                callbacks=callbacks,
            )
            history = trainer.fit(data, epochs=2, verbose=0, **sizes)
        assert history.history["staleness"] == [0, 0]
        assert_equal(apart, alone)


def _see(batch: int, logs: Any) -> None:
    assert np.isfinite(logs["loss"])


def test_training_goes_on_where_it_was() -> None:
    """The optimizer's slots, which servers have, come to the script's own optimizer."""
    one = case("mlp")
    data: Any = one.inputs, one.targets
    histories = []
    for strategy in (
        lockstep.SingleDeviceStrategy(),
        lockstep.ParameterServerStrategy(2, 2, 0),
        lockstep.ParameterServerStrategy(2, 1, 1),
    ):
        trainer = lockstep.Trainer(
            one.make_model(), loss=one.loss, optimizer=torch.optim.Adam, strategy=strategy
        )
        for _ in range(2):
            history = trainer.fit(data, batch_size=len(data[1]), verbose=0)
        histories.append(history.history["loss"])
        steps = {int(slots["step"]) for slots in trainer.optimizer.state.values()}
        assert steps == {2}
    np.testing.assert_allclose(histories, [histories[0]] * 3, rtol=1e-5)


class _Interrupting(Sums):
    """Presses Ctrl-C in its fifth forward pass, in the script's own process."""

    def __init__(self) -> None:
        super().__init__(seconds=0.002)
        self.calls = itertools.count(1)
        self.presses = True

    def forward(self, inputs: Tensor) -> Tensor:
        if self.presses and self.training and next(self.calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return super().forward(inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "presses": False}


@pytest.mark.parametrize("staleness", core_of([4, None], [None]))
def test_ctrl_c_brings_what_was_begun_to_its_end(staleness: int | None) -> None:
    model = _Interrupting()
    with pytest.raises(KeyboardInterrupt):
        trained(lockstep.ParameterServerStrategy(2, 3, staleness), model)
    # Each update is that of a whole batch, and no batch was left half done.
    inputs, weights = sample_data()
    updates = torch.stack(
        [
            -0.1 * (inputs[rows] * weights[rows, None]).sum(0) / weights[rows].sum()
            for rows in (slice(at, at + 10) for at in range(0, NUM_SAMPLES, BATCH_SIZE))
        ]
    )
    counts = torch.linalg.lstsq(updates.T, model.weight.detach()[:, :1]).solution.flatten()
    assert torch.allclose(counts, counts.round(), atol=1e-9)
    assert 1 <= counts.sum().round() < EPOCHS * len(updates)


class _Dying(Sums):
    """Its helpers end in a forward pass: one after another, as often as there are files to take."""

    def __init__(self, folder: Path) -> None:
        super().__init__(seconds=0.002)
        self.folder, self.calls = folder, itertools.count()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and os.getpid() != self.first and next(self.calls) == 7:
            for one in self.folder.iterdir():
                with suppress(FileNotFoundError):
                    one.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


@pytest.mark.thorough
def test_with_restarts_every_sample_counts_once_whoever_dies(tmp_path: Path) -> None:
    kills = 2
    for number in range(kills):
        (tmp_path / str(number)).touch()
    model = _Dying(tmp_path)
    history = trained(lockstep.ParameterServerStrategy(2, 3, 4), model, restarts=kills)
    assert not list(tmp_path.iterdir())
    assert 1 <= len(history.restarts) <= kills
    assert_equal(model, plain(EPOCHS))


# --- sparse embeddings ----------------------------------------------------------------------------


class Rated(nn.Module):
    """Embeddings of which a batch touches a few rows, and a dense layer."""

    def __init__(self, *, has_dense: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.users = nn.Embedding(101, 6, sparse=True)
        self.items = nn.Embedding(53, 6, sparse=True)
        self.dense = nn.Linear(6, 1) if has_dense else nn.Identity()
        for weight in self.parameters():
            weight.data.normal_(generator=generator)

    def forward(self, numbers: Tensor) -> Tensor:
        users, items = self.users(numbers[:, 0]), self.items(numbers[:, 1])
        return torch.as_tensor(self.dense(users * items)).sum(1)


def ratings() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.stack(
        [
            torch.randint(70, (53,), generator=generator),
            torch.randint(53, (53,), generator=generator),
        ],
        1,
    )
    return numbers, torch.randn(53, dtype=torch.float64, generator=generator)


def plain_ratings(optimizer_of: Any, *, has_dense: bool) -> tuple[nn.Module, Any]:
    model = Rated(has_dense=has_dense).double()
    optimizer = optimizer_of(model.parameters())
    numbers, targets = ratings()
    for _ in range(2):
        for at in range(0, len(numbers), 13):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(numbers[at : at + 13]), targets[at : at + 13]).backward()
            optimizer.step()
    return model, optimizer


SPARSE_OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "SparseAdam": partial(torch.optim.SparseAdam, lr=0.1),
}


@pytest.mark.parametrize(("servers", "workers"), core_of([(1, 2), (2, 3), (3, 2)], [(2, 3)]))
@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
def test_rows_that_are_touched_are_as_on_one_device(name: str, servers: int, workers: int) -> None:
    """So are the slots; and of rows that are not touched, nothing changes."""
    optimizer_of, has_dense = SPARSE_OPTIMIZERS[name], name != "SparseAdam"
    expected, plain_optimizer = plain_ratings(optimizer_of, has_dense=has_dense)
    model = Rated(has_dense=has_dense).double()
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=optimizer_of,
        strategy=lockstep.ParameterServerStrategy(min(servers, 2), workers),
        precision="fp64",
    )
    for _ in range(2):
        trainer.fit(ratings(), batch_size=13, shuffle=False, verbose=0)
    assert_equal(model, expected)
    untouched = Rated(has_dense=has_dense).double().users.weight[70:]
    assert torch.equal(model.users.weight[70:], untouched)
    own = trainer.optimizer.state
    for (_, slots), found in zip(plain_optimizer.state.items(), own.values(), strict=True):
        for slot, value in slots.items():
            difference = torch.as_tensor(found[slot] - value, dtype=torch.float64).norm()
            assert difference <= 1e-12 * max(torch.as_tensor(value).double().norm(), 1), slot


@pytest.mark.parametrize("accumulate", core_of([1, 2], [2]))
def test_no_touched_row_is_lost_by_workers_that_do_not_wait(accumulate: int) -> None:
    """Sums of embeddings: their gradients are counts, whatever the weights are."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(71, 3, sparse=True)
            nn.init.zeros_(self.rows.weight)

        def forward(self, numbers: Tensor) -> Tensor:
            return torch.as_tensor(self.rows(numbers[:, 0])).sum(1)

    numbers, weights = ratings()[0], torch.rand(53, dtype=torch.float64)
    model = Counts().double()
    strategy = lockstep.ParameterServerStrategy(1, 3, None)
    trained(strategy, model, (numbers, weights), accumulate=accumulate)
    expected = torch.zeros(71, dtype=torch.float64)
    for at in range(0, 53, BATCH_SIZE):
        rows = slice(at, at + BATCH_SIZE)
        expected.index_add_(0, numbers[rows, 0], weights[rows] / weights[rows].sum())
    found = model.rows.weight.detach()
    assert (found - EPOCHS * -0.1 * expected[:, None]).abs().max() <= 1e-12


def test_a_model_with_sparse_embeddings_is_proved() -> None:
    job = lockstep.Job(
        model=Rated(),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adagrad, lr=0.1),
        data=ratings(),
        batch_size=13,
    )
    report = lockstep.verify(job, lockstep.ParameterServerStrategy(2, 3), steps=5)
    assert report.passed, str(report)


def _with_rows(optimizer: Any, strategy: Any, model: nn.Module, **options: Any) -> None:
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=optimizer,
        strategy=strategy,
        precision="fp64",
        **options,
    )
    trainer.fit(ratings(), batch_size=13, verbose=0)


def test_sparse_gradients_are_clipped_as_dense_ones() -> None:
    weights = []
    for strategy in (lockstep.SingleDeviceStrategy(), lockstep.ParameterServerStrategy(2, 2)):
        model = Rated().double()
        _with_rows(partial(torch.optim.SGD, lr=0.1), strategy, model, clip_norm=0.5)
        weights.append(model)
    assert_equal(*weights)


class _Tied(Rated):
    """Its users' weights are multiplied by, too."""

    def forward(self, numbers: Tensor) -> Tensor:
        return torch.as_tensor(self.users(numbers[:, 0]) @ self.users.weight.T).sum(1)


def test_sparse_gradients_that_cannot_be_are_refused() -> None:
    strategy = lockstep.ParameterServerStrategy(1, 2)
    with pytest.raises(OptionError, match="cannot apply sparse gradients"):
        _with_rows(partial(torch.optim.Adam, lr=0.1), strategy, Rated().double())
    with pytest.raises(OptionError, match="cannot apply sparse gradients"):
        _with_rows(partial(torch.optim.SGD, lr=0.1, momentum=0.9), strategy, Rated().double())
    kept: list[dict[str, Any]] = [{"average": lockstep.EMA(0.5)}, {"precision": "bf16"}]
    for options in kept:
        with pytest.raises(OptionError, match="averages and float32 copies"):
            lockstep.Trainer(
                Rated(),
                loss=nn.MSELoss(),
                optimizer=partial(torch.optim.SGD, lr=0.1),
                strategy=strategy,
                **options,
            ).fit((torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4)), verbose=0)
    model = Rated(has_dense=False).double()
    with pytest.raises(OptionError, match="SparseAdam needs sparse gradients"):
        _with_rows(torch.optim.SparseAdam, lockstep.MirroredStrategy(2), model)
    with pytest.raises(ModelError, match=r"a dense gradient of 'users\.weight'"):
        _with_rows(partial(torch.optim.SGD, lr=0.1), strategy, _Tied().double())


# --- what is refused ------------------------------------------------------------------------------


class _Own(torch.optim.SGD):
    """An optimizer that may do anything."""


@pytest.mark.parametrize(
    ("options", "staleness", "message"),
    [
        ({"optimizer": partial(_Own, lr=0.1)}, 0, "must copy the optimizer"),
        ({"precision": "bf16"}, 1, "no common loss scale"),
        (
            {
                "schedule": lockstep.Schedule(
                    partial(torch.optim.lr_scheduler.StepLR, step_size=1), every="step"
                )
            },
            None,
            "every='epoch'",
        ),
    ],
)
def test_what_servers_cannot_do_is_refused(
    options: dict[str, Any], staleness: int | None, message: str
) -> None:
    one = case("mlp")
    trainer = lockstep.Trainer(
        one.make_model(),
        **{"loss": one.loss, "optimizer": one.optimizer, **options},
        strategy=lockstep.ParameterServerStrategy(1, 2, staleness),
    )
    with pytest.raises(OptionError, match=message):
        trainer.fit((one.inputs, one.targets), batch_size=10, verbose=0)


def test_more_servers_than_parameters_are_refused() -> None:
    with pytest.raises(OptionError, match="servers=3 with 2 parameters"):
        trained(lockstep.ParameterServerStrategy(3, 2), Sums())


def tf_config(**cluster: list[str]) -> dict[str, str]:
    task = {"type": "worker", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


SERVED = tf_config(worker=["localhost:1", "localhost:2"], ps=["localhost:3"])


@pytest.mark.parametrize(
    ("variables", "make", "message"),
    [
        (
            tf_config(worker=["localhost:1", "localhost:2"]),
            lockstep.ParameterServerStrategy,
            r"cannot tell which processes.*none of the role 'ps'",
        ),
        (SERVED, lockstep.MultiWorkerMirroredStrategy, "Only ParameterServerStrategy"),
        (SERVED, lockstep.MirroredStrategy, "trains on one host with one script"),
        (
            SERVED,
            partial(lockstep.ParameterServerStrategy, 2),
            "workers=None, servers=2 with 2 and 1 tasks",
        ),
        (
            SERVED,
            partial(lockstep.ParameterServerStrategy, replicas=2),
            "replicas=2 under TF_CONFIG",
        ),
        (
            {"LOCKSTEP_SERVERS": "none"},
            lockstep.ParameterServerStrategy,
            "LOCKSTEP_SERVERS must be a number of at least 1",
        ),
    ],
)
def test_roles_that_do_not_fit_are_refused(
    variables: dict[str, str], make: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "_DISMISSAL_SECONDS", 0.1)  # nobody comes who would be told
    with pytest.raises(OptionError, match=message):
        trained(make(), Sums())


def test_a_proof_needs_workers_that_wait() -> None:
    with pytest.raises(OptionError, match="staleness=2"):
        lockstep.verify(make_job(case("mlp")), lockstep.ParameterServerStrategy(1, 2, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lockstep.ParameterServerStrategy(0), "servers=0"),
        (lambda: lockstep.ParameterServerStrategy(1, 0), "workers=0"),
        (lambda: lockstep.ParameterServerStrategy(1, 2, -1), "staleness=-1"),
        (lambda: lockstep.ParameterServerStrategy(1, 2, True), "staleness=True"),
        (lambda: lockstep.ParameterServerStrategy(1, 2, 1.5), "staleness=1.5"),  # type: ignore[arg-type]
        (lambda: lockstep.ParameterServerStrategy(1, 2, replicas=3), "replicas=3"),
        (lambda: lockstep.ParameterServerStrategy(1, 2, replicas=0), "replicas=0"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()
