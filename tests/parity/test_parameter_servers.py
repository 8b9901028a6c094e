"""Parameter servers: exact where workers wait, and no sample lost where they do not.

That ``staleness=0`` is one device is in the parity table. With workers some steps apart only a loss
whose gradients do not depend on the weights has the same result: there every sample must have
counted once, with its weight, whoever has computed it.
"""

import itertools
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import OptionError
from tests.parity.test_parity import make_job
from tests.thorough import core_of
from tests.zoo import case

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 107, 10, 3


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
        return (inputs @ self.weight + self.bias).sum(1)


def weighted(outputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return (outputs * weights).sum(), weights.sum()


def sample_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 30, dtype=torch.float64, generator=generator)
    return inputs, torch.rand(NUM_SAMPLES, dtype=torch.float64, generator=generator)


def plain(epochs: int) -> Sums:
    """Each batch once, in one process; the order of the batches is of no account, but their rows."""
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


def trained(strategy: Any, model: nn.Module, data: Any = None, **options: Any) -> lockstep.History:
    trainer = lockstep.Trainer(
        model,
        loss=weighted,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=strategy,
        precision="fp64",
        **options,
    )
    batch = {} if isinstance(data, DataLoader) else {"batch_size": BATCH_SIZE}
    return trainer.fit(data or sample_data(), epochs=EPOCHS, shuffle=False, verbose=0, **batch)


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
            sizes: dict[str, int] = {"batch_size": one.batch_size}
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


# --- what is refused ------------------------------------------------------------------------------


class _Own(torch.optim.SGD):
    """An optimizer that may do anything."""


@pytest.mark.parametrize(
    ("options", "staleness", "message"),
    [
        ({"optimizer": partial(_Own, lr=0.1)}, 0, "know how to copy it"),
        ({"precision": "bf16"}, 1, "no loss scale"),
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


def test_restarts_need_workers_that_wait() -> None:
    trainer = lockstep.Trainer(
        Sums(),
        loss=weighted,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.ParameterServerStrategy(1, 2, 1),
        precision="fp64",
    )
    with pytest.raises(OptionError, match="staleness=0"):
        trainer.fit(sample_data(), batch_size=BATCH_SIZE, restarts=1, verbose=0)


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
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


# --- Keras ----------------------------------------------------------------------------------------


def keras_losses(strategy: lockstep.Strategy) -> list[float]:
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((96, 8)).astype("float32")
    targets = inputs[:, :1] * 2 - 1
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    losses: list[float] = model.fit(
        inputs, targets, batch_size=16, epochs=3, shuffle=False, verbose=0
    ).history["loss"]
    return losses


def test_a_keras_model_trains_in_the_scope() -> None:
    alone = keras_losses(lockstep.SingleDeviceStrategy())
    np.testing.assert_allclose(
        keras_losses(lockstep.ParameterServerStrategy(1, 2)), alone, rtol=1e-5
    )
    apart = keras_losses(lockstep.ParameterServerStrategy(1, 2, 2))
    np.testing.assert_allclose(apart, alone, rtol=0.1)
