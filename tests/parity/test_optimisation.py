"""The parity table of optimizers and schedules: on 2 and 3 replicas, and in a pipeline, in fp64.

The reference is a plain PyTorch loop over whole batches, written out here: the order of calls is
what torch's documentation says of schedulers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import lockstep
from lockstep import errors
from tests.thorough import core_of
from tests.zoo import build_seeded, case, make_job, normal, teach_classes

TOLERANCE = 1e-12
BATCH, EPOCHS = 13, 4
GENERATOR = torch.Generator().manual_seed(31)
X = normal(GENERATOR, 4 * BATCH + 3, 8)
Y = teach_classes(GENERATOR, X, 4)
VALIDATION = X[:20] + 0.5, Y[:20].flip(0)
STEPS = EPOCHS * 5

STRATEGIES = {
    "mirrored-1": lockstep.MirroredStrategy(1),
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-3": lockstep.MirroredStrategy(3),
    "mirrored-2-shares-5": lockstep.MirroredStrategy(2, num_shares=5),
    "pipeline-2": lockstep.PipelineStrategy(2, microbatches=3),
}
PLAIN_LOSS = nn.CrossEntropyLoss()


def make_model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(12, 4)).double()


Optimizers = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


def two_groups(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Biases do not decay, and learn faster."""
    every = list(parameters)
    weights = [one for one in every if one.dim() > 1]
    biases = [one for one in every if one.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": weights},
        {"params": biases, "weight_decay": 0.0, "lr": 2e-2},
    ]
    return optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


SGD: Optimizers = partial(optim.SGD, lr=0.5, momentum=0.9)
NESTEROV: Optimizers = partial(optim.SGD, lr=0.2, momentum=0.9, nesterov=True, weight_decay=1e-2)
ADAMW: Optimizers = partial(optim.AdamW, lr=1e-2)


@dataclass(frozen=True)
class Row:
    """An optimizer, its schedule, and when the reference steps it."""

    optimizer: Optimizers
    schedule: Any = None
    every: str = ""
    monitor: str | None = None


def warm_then_cosine(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
        ],
        milestones=[3],
    )


def chained(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.8),
        ]
    )


def by_group(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(
        optimizer, [lambda count: 0.9**count, lambda count: 1 / (1 + count)]
    )


def on_tensors(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=torch.tensor(1e-2, dtype=torch.float64), foreach=False)


ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=STEPS)
CYCLIC = partial(lr_scheduler.CyclicLR, base_lr=0.05, max_lr=0.4, step_size_up=3)
PLATEAU = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
RESTARTS = partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4, T_mult=2)

ROWS: dict[str, Row] = {
    "AdamW with two groups": Row(two_groups),
    "SGD with Nesterov": Row(NESTEROV),
    "RMSprop": Row(partial(optim.RMSprop, lr=3e-3, momentum=0.5, centered=True)),
    "Adagrad": Row(partial(optim.Adagrad, lr=5e-2, lr_decay=1e-2)),
    "OneCycle, SGD": Row(SGD, ONE_CYCLE, "step"),
    "OneCycle, AdamW": Row(ADAMW, ONE_CYCLE, "step"),
    "OneCycle, two groups": Row(
        two_groups,
        partial(lr_scheduler.OneCycleLR, max_lr=[0.02, 0.05], total_steps=STEPS),
        "step",
    ),
    "Cyclic": Row(SGD, CYCLIC, "step"),
    "ReduceLROnPlateau": Row(SGD, PLATEAU, "epoch", "val_loss"),
    "cosine with warm restarts per step": Row(
        NESTEROV, lockstep.Schedule(RESTARTS, every="step"), "step"
    ),
    "cosine with warm restarts": Row(NESTEROV, RESTARTS, "epoch"),
    "a rate that is a tensor": Row(on_tensors, lockstep.Schedule(RESTARTS, every="step"), "step"),
    "one function for each group": Row(two_groups, by_group, "epoch"),
    "one after the other": Row(ADAMW, lockstep.Schedule(warm_then_cosine, every="step"), "step"),
    "one upon the other": Row(ADAMW, chained, "epoch"),
}


class Reference:
    """A plain loop on one device."""

    def __init__(self, row: Row) -> None:
        self.model = build_seeded(make_model)
        self.optimizer = row.optimizer(self.model.parameters())
        make = row.schedule.make if isinstance(row.schedule, lockstep.Schedule) else row.schedule
        self.scheduler: Any = None if make is None else make(self.optimizer)
        self.every, self.monitor = row.every, row.monitor
        self.rates: list[list[float]] = []
        self.next_rates: list[float] = []
        self.losses: list[float] = []

    def train(self) -> "Reference":
        for _ in range(EPOCHS):
            total = 0.0
            for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
                self.optimizer.zero_grad()
                loss = PLAIN_LOSS(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                total += loss.item() * len(x)
                rates = [float(group["lr"]) for group in self.optimizer.param_groups]
                if self.every == "step":
                    self.scheduler.step()
                self.next_rates.append(self.optimizer.param_groups[0]["lr"])
            self.rates.append(rates)
            self.losses.append(total / len(X))
            if self.every == "epoch":
                self.scheduler.step(*([self.validate()] if self.monitor else []))
        return self

    @torch.no_grad()
    def validate(self) -> float:
        loss: Tensor = PLAIN_LOSS(self.model(VALIDATION[0]), VALIDATION[1])
        return loss.item()


def train(
    row: Row, strategy: str, **options: Any
) -> tuple[lockstep.Trainer, dict[str, list[float]]]:
    trainer = lockstep.Trainer(
        build_seeded(make_model),
        loss=PLAIN_LOSS,
        optimizer=row.optimizer,
        schedule=row.schedule,
        strategy=STRATEGIES[strategy],
        precision="fp64",
        **options,
    )
    validation = VALIDATION if row.monitor == "val_loss" else None
    history = trainer.fit(
        (X, Y),
        epochs=EPOCHS,
        batch_size=BATCH,
        shuffle=False,
        validation_data=validation,
        verbose=0,
    )
    return trainer, history.history


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one - other).norm() <= TOLERANCE * other.norm()


@pytest.mark.parametrize(
    ("name", "strategy"),
    core_of(
        [(name, strategy) for name in ROWS for strategy in STRATEGIES],
        lambda name, strategy: (
            strategy == "mirrored-2" or (name == "one upon the other" and strategy == "pipeline-2")
        ),
    ),
)
def test_training_equals_a_plain_loop(name: str, strategy: str) -> None:
    row = ROWS[name]
    reference = Reference(row).train()
    trainer, history = train(row, strategy)
    assert_same(trainer.model, reference.model)
    assert history["loss"] == pytest.approx(reference.losses, rel=TOLERANCE)
    if row.schedule is None:
        assert trainer.schedule is None
        assert not any(log.startswith("lr") for log in history)
        return
    columns = list(zip(*reference.rates, strict=True))
    names = ["lr"] if len(columns) == 1 else [f"lr_{number}" for number in range(len(columns))]
    for log, expected in zip(names, columns, strict=True):
        assert history[log] == list(expected)
    assert trainer.schedule is not None
    assert trainer.schedule.every == row.every
    assert trainer.schedule.scheduler.get_last_lr() == reference.scheduler.get_last_lr()


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.schedule])
def test_the_schedule_matters(name: str) -> None:
    """Otherwise the test above would pass for a Trainer that ignores it."""
    row = ROWS[name]
    plain = Reference(Row(row.optimizer)).train()
    scheduled = Reference(row).train()
    first = next(scheduled.model.parameters()) - next(plain.model.parameters())
    assert first.norm() > 1e-6
    assert len({tuple(rates) for rates in scheduled.rates}) > 1


@pytest.mark.parametrize("name", ["OneCycle, SGD", "ReduceLROnPlateau"])
def test_the_bits_are_the_same_twice(name: str) -> None:
    (one, history), (other, again) = (train(ROWS[name], "mirrored-2-shares-5") for _ in range(2))
    assert history == again
    for left, right in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(left, right)


class Watching(lockstep.Callback):
    """Acts at every step, so that ranks wait for it there."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self.trainer.optimizer is not None
        self.rates.append(self.trainer.optimizer.param_groups[0]["lr"])


class Halving(lockstep.Callback):
    """Changes a rate beside the schedule."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self.trainer.optimizer is not None
        for group in self.trainer.optimizer.param_groups:
            group["weight_decay"] = 0.1 * (epoch + 1)


@pytest.mark.parametrize("strategy", ["mirrored-2", "mirrored-3", "pipeline-2"])
def test_callbacks_see_the_rate_of_the_next_step(strategy: str) -> None:
    watching = Watching()
    trainer, _ = train(ROWS["OneCycle, AdamW"], strategy, callbacks=[watching])
    reference = Reference(ROWS["OneCycle, AdamW"]).train()
    assert_same(trainer.model, reference.model)
    assert watching.rates == reference.next_rates


@pytest.mark.parametrize("strategy", ["mirrored-2", "mirrored-3", "pipeline-2"])
def test_what_callbacks_change_beside_a_schedule_reaches_all_ranks(strategy: str) -> None:
    alone, _ = train(ROWS["OneCycle, AdamW"], "mirrored-1", callbacks=[Halving()])
    together, _ = train(ROWS["OneCycle, AdamW"], strategy, callbacks=[Halving()])
    assert_same(together.model, alone.model)


# --- token weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3])
def test_a_language_model_with_padding(devices: int) -> None:
    report = lockstep.verify(make_job(case("gpt_tied")), lockstep.MirroredStrategy(devices))
    assert report.passed, str(report)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_language_model_with_padding_and_a_schedule(devices: int) -> None:
    one = case("gpt_tied")
    inputs = one.inputs
    assert isinstance(inputs, Tensor)
    model, steps = one.make_model().double(), 10
    optimizer = one.optimizer(model.parameters())
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    for _ in range(2):
        for tokens, targets in zip(inputs.split(11), one.targets.split(11), strict=True):
            optimizer.zero_grad()
            total, weight = one.loss(model(tokens), targets)
            (total / weight).backward()
            optimizer.step()
            scheduler.step()
    trainer = lockstep.Trainer(
        one.make_model(),
        loss=one.loss,
        optimizer=one.optimizer,
        schedule=partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=steps),
        strategy=lockstep.MirroredStrategy(devices),
        precision="fp64",
    )
    trainer.fit((inputs, one.targets), epochs=2, batch_size=11, shuffle=False, verbose=0)
    assert_same(trainer.model, model)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("as_instance", [False, True])
def test_lbfgs_is_refused_with_a_reason(as_instance: bool) -> None:
    model = make_model()
    optimizer = optim.LBFGS(model.parameters()) if as_instance else optim.LBFGS
    with pytest.raises(errors.OptionError, match="LBFGS evaluates the loss several times per step"):
        lockstep.Trainer(model, loss=PLAIN_LOSS, optimizer=optimizer, precision="fp64")
