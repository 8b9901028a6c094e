"""Going on from a state: two epochs are one, a state, a fresh Trainer that loads it, and one more.

The table: strategy and feature. Bits where the strategy stays, or the number of shares does; 1e-12
in float64 where neither does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import torchmetrics
from torch import Tensor, nn, optim

import lockstep
from lockstep.errors import CheckpointError
from lockstep.train.checkpointing.training_state import TrainingState
from tests.states import first_difference, from_flat
from tests.thorough import core_of

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(57, 6, generator=GENERATOR)
Y = torch.randint(3, (57,), generator=GENERATOR)
BATCH = 12  # the last is short
TOLERANCE = 1e-12

STRATEGIES = {
    "single": lockstep.SingleDeviceStrategy(),
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-2-shares-4": lockstep.MirroredStrategy(2, num_shares=4),
    "mirrored-2-gloo": lockstep.MirroredStrategy(2, engine="gloo"),
    "pipeline-2": lockstep.PipelineStrategy(2, microbatches=3),
    "hybrid-2x2": lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
}


def multiclass_metrics() -> dict[str, torchmetrics.Metric]:
    """One that is counted by share, and one that gets whole batches."""
    options: dict[str, Any] = {"task": "multiclass", "num_classes": 3}
    return {
        "accuracy": torchmetrics.Accuracy(**options),
        "auroc": torchmetrics.AUROC(**options),
        "latest": torchmetrics.wrappers.Running(torchmetrics.Accuracy(**options), 3),
    }


def make_model(*, normed: bool = True) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8)]
    return nn.Sequential(*layers, *([nn.BatchNorm1d(8)] if normed else []), nn.Linear(8, 3))


def two_groups(parameters: Any) -> optim.Optimizer:
    every = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [one for one in every if one.dim() > 1]},
        {"params": [one for one in every if one.dim() == 1], "lr": 3e-2},
    ]
    return optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


class Lookahead(optim.Optimizer):
    """Nothing is known of it, and it keeps more than slots: ``state_dict`` is its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.slow: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = [one for group in self.param_groups for one in group["params"]]
        slow = self.slow or [one.detach().clone() for one in weights]
        with torch.no_grad():
            for one, before in zip(weights, slow, strict=True):
                if one.grad is not None:
                    one -= self.param_groups[0]["lr"] * one.grad
                    one += 0.5 * (before - one)
        self.slow = [one.detach().clone() for one in weights]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slow = state.pop("slow")
        super().load_state_dict(state)


@dataclass(frozen=True)
class Feature:
    """What a training has that must go on."""

    options: Mapping[str, Any] = field(default_factory=dict)
    normed: bool = True
    strategies: tuple[str, ...] = ("mirrored-2", "pipeline-2")


EVERYWHERE = tuple(STRATEGIES)
NOT_PIPELINES = ("single", "mirrored-2", "mirrored-2-shares-4", "mirrored-2-gloo")
COSINE = partial(optim.lr_scheduler.CosineAnnealingLR, T_max=5)
ONE_CYCLE = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10)
PLATEAU = partial(optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=9.0)
STEPS = partial(optim.lr_scheduler.MultiStepLR, milestones=[1, 2])

FEATURES: dict[str, Feature] = {
    "Adam": Feature(strategies=EVERYWHERE),
    "SGD with momentum": Feature({"optimizer": partial(optim.SGD, lr=0.1, momentum=0.9)}),
    "SGD without slots": Feature({"optimizer": partial(optim.SGD, lr=0.1)}),
    "two groups": Feature({"optimizer": two_groups}),
    "whole parameters": Feature({"optimizer": optim.Adafactor}, strategies=EVERYWHERE),
    "an optimizer of one's own": Feature({"optimizer": Lookahead}, strategies=NOT_PIPELINES),
    "a rate that is a tensor": Feature(
        {"optimizer": lambda ps: optim.Adam(ps, lr=torch.tensor(0.01), foreach=False)},
        strategies=("single", "mirrored-2"),
    ),
    "cosine": Feature({"schedule": COSINE}),
    "one cycle": Feature({"schedule": ONE_CYCLE}),
    "plateau": Feature({"schedule": PLATEAU}),
    "milestones": Feature({"schedule": STEPS}),
    "averages": Feature({"average": lockstep.EMA(0.9)}),
    "float16": Feature({"precision": "fp16-mixed"}),
    "bfloat16": Feature({"precision": "bf16"}),
    "averages of bfloat16": Feature(
        {"precision": "bf16", "average": lockstep.EMA(0.9)}, strategies=EVERYWHERE
    ),
    "float64, clipped": Feature({"precision": "fp64", "clip_norm": 0.1}),
    "skipping": Feature({"on_nonfinite": "skip"}),
    "no normalisation": Feature(normed=False),
}


def make_trainer(feature: str, strategy: str, *, seed: int = 0) -> lockstep.Trainer:
    torch.manual_seed(seed)
    found = FEATURES[feature]
    metrics = multiclass_metrics()
    options = {"optimizer": partial(optim.Adam, lr=1e-2), "metrics": metrics, **found.options}
    return lockstep.Trainer(
        make_model(normed=found.normed),
        loss=nn.CrossEntropyLoss(),
        strategy=STRATEGIES[strategy],
        seed=7,
        **options,
    )


def fit(trainer: lockstep.Trainer, epochs: int = 1) -> dict[str, list[Any]]:
    history: dict[str, list[Any]] = trainer.fit(
        (X, Y), epochs=epochs, batch_size=BATCH, verbose=0
    ).history
    return history


def through_files(state: dict[str, Any]) -> dict[str, Any]:
    """As another process finds it, of tensors and JSON."""
    tensors, values = TrainingState.of(state).flat()
    copies = {name: one.clone().contiguous() for name, one in tensors.items()}
    read = msgspec.json.decode(msgspec.json.encode(values))
    return from_flat(copies, read).parts()


ROWS = [(strategy, feature) for feature, found in FEATURES.items() for strategy in found.strategies]
CORE = [
    ("single", "Adam"),
    ("mirrored-2", "averages of bfloat16"),
    ("pipeline-2", "cosine"),
]
# Each kind of state that a feature adds, and each strategy, once.
MORE = [
    ("mirrored-2-shares-4", "Adam"),
    ("mirrored-2-gloo", "whole parameters"),
    ("hybrid-2x2", "Adam"),
    *(("mirrored-2", feature) for feature in ("an optimizer of one's own", "float16")),
]


@pytest.mark.parametrize(("strategy", "feature"), core_of(ROWS, CORE, MORE))
def test_one_more_epoch_has_the_bits_of_the_second(strategy: str, feature: str) -> None:
    whole, first = make_trainer(feature, strategy), make_trainer(feature, strategy)
    expected = fit(whole, 2)
    found = fit(first)
    state = first.state_dict()
    second = make_trainer(feature, strategy, seed=1)
    second.load_state_dict(through_files(state))
    assert first_difference(TrainingState.of(state), TrainingState.of(second.state_dict())) is None
    more = fit(second)
    assert {name: [*values, *more[name]] for name, values in found.items()} == expected
    ends = [TrainingState.of(one.state_dict()) for one in (whole, second)]
    assert first_difference(ends[0], ends[1]) is None
    assert ends[0].digest() == ends[1].digest()
    if "average" in FEATURES[feature].options:
        with whole.averaged(), second.averaged():
            assert torch.equal(*(one.predict(X) for one in (whole, second)))


# --- under another strategy ----------------------------------------------------------------------


def make_double(strategy: lockstep.SingleDeviceStrategy | Any, *, seed: int = 0) -> Any:
    """In float64, without random numbers: they are those of shares."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 3))
    return lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(optim.AdamW, lr=1e-2),
        strategy=strategy,
        precision="fp64",
        average=lockstep.EMA(0.9),
        schedule=COSINE,
    )


PAIRS = [(one, other) for one in STRATEGIES for other in STRATEGIES if one != other]
PAIRS_CORE = [("mirrored-2", "single"), ("mirrored-2", "pipeline-2"), ("hybrid-2x2", "mirrored-2")]


@pytest.mark.parametrize(("saving", "loading"), core_of(PAIRS, PAIRS_CORE))
def test_another_strategy_goes_on(saving: str, loading: str) -> None:
    whole = make_double(lockstep.SingleDeviceStrategy())
    fit(whole, 2)
    first, second = make_double(STRATEGIES[saving]), make_double(STRATEGIES[loading], seed=1)
    fit(first)
    state = first.state_dict()
    second.load_state_dict(through_files(state))
    assert TrainingState.of(second.state_dict()).digest() == TrainingState.of(state).digest()
    fit(second)
    expected, found = (TrainingState.of(one.state_dict()).flat()[0] for one in (whole, second))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        scale = max(float(tensor.double().norm()), 1.0)
        assert float((tensor - found[name]).double().norm()) <= TOLERANCE * scale, name


SHARES: list[Callable[[], Any]] = [
    partial(lockstep.MirroredStrategy, 1, num_shares=4),
    partial(lockstep.MirroredStrategy, 2, num_shares=4),
    partial(lockstep.MirroredStrategy, 4),
]


@pytest.mark.parametrize(("saving", "loading"), core_of([(0, 1), (1, 0), (1, 2), (2, 0)], [(1, 2)]))
def test_with_as_many_shares_another_number_of_devices_gives_the_same_bits(
    saving: int, loading: int
) -> None:
    def make(number: int, seed: int) -> lockstep.Trainer:
        torch.manual_seed(seed)
        return lockstep.Trainer(
            make_model(),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(optim.Adam, lr=1e-2),
            strategy=SHARES[number](),
            average=lockstep.EMA(0.9),
        )

    whole, first, second = make(saving, 0), make(saving, 0), make(loading, 1)
    fit(whole, 2)
    fit(first)
    second.load_state_dict(first.state_dict())
    fit(second)
    states = [TrainingState.of(one.state_dict()) for one in (whole, second)]
    assert first_difference(states[0], states[1]) is None


def test_several_optimizers_go_on() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 4), nn.Linear(4, 6)

    def pull(model: Pair, batch: Tensor) -> Tensor:
        values: Tensor = model.one(batch).square().mean(1)
        return values

    def restore(model: Pair, batch: Tensor) -> Tensor:
        values: Tensor = (model.other(model.one(batch)) - batch).square().mean(1)
        return values

    def make(seed: int) -> lockstep.Trainer:
        torch.manual_seed(seed)
        return lockstep.Trainer(
            Pair(),
            train_step={"one": pull, "other": restore},
            optimizer={"one": partial(optim.SGD, lr=0.1, momentum=0.9), "other": optim.Adam},
            strategy=lockstep.MirroredStrategy(2),
        )

    whole, first, second = make(0), make(0), make(1)
    whole.fit((X,), epochs=2, batch_size=BATCH, verbose=0)
    first.fit((X,), batch_size=BATCH, verbose=0)
    second.load_state_dict(through_files(first.state_dict()))
    second.fit((X,), batch_size=BATCH, verbose=0)
    states = [TrainingState.of(one.state_dict()) for one in (whole, second)]
    assert first_difference(states[0], states[1]) is None


# --- within a fit --------------------------------------------------------------------------------


class Taking(lockstep.Callback):
    """Takes the state after a step, counted from 0 over all epochs, or after an epoch."""

    def __init__(self, *, step: int | None = None, epoch: int | None = None) -> None:
        self._step, self._epoch = step, epoch
        self._num_steps = 0
        self.state: dict[str, Any] | None = None

    def takes_state(self, batch: int) -> bool:
        return self._num_steps == self._step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._num_steps == self._step:
            self.state = self.trainer.state_dict()
            raise ZeroDivisionError
        self._num_steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            self.state = self.trainer.state_dict()
            raise ZeroDivisionError


def fit_for_long(trainer: lockstep.Trainer) -> dict[str, list[Any]]:
    options: dict[str, Any] = {"epochs": 3, "batch_size": BATCH, "verbose": 0}
    history: dict[str, list[Any]] = trainer.fit(
        (X, Y), validation_data=(X[:20], Y[:20]), **options
    ).history
    return history


PLACES: dict[str, dict[str, int]] = {
    "the first step": {"step": 0},
    "within an epoch": {"step": 7},
    "the last step of an epoch": {"step": 9},
    "an epoch": {"epoch": 0},
}
WITHIN = ["Adam", "one cycle", "averages of bfloat16", "float16", "skipping"]
WITHIN_ROWS = [
    (strategy, feature, place)
    for strategy in STRATEGIES
    for feature in WITHIN
    for place in PLACES
    if feature == "Adam" or place == "within an epoch"
]
WITHIN_CORE = [
    ("single", "Adam", "within an epoch"),
    ("mirrored-2", "averages of bfloat16", "within an epoch"),
]
WITHIN_MORE = [
    *(("mirrored-2", "Adam", place) for place in PLACES if place != "within an epoch"),
    ("pipeline-2", "float16", "within an epoch"),
    ("hybrid-2x2", "skipping", "within an epoch"),
]


@pytest.mark.parametrize(
    ("strategy", "feature", "place"), core_of(WITHIN_ROWS, WITHIN_CORE, WITHIN_MORE)
)
def test_a_fit_goes_on_within_an_epoch(strategy: str, feature: str, place: str) -> None:
    onlooker = lockstep.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    again = lockstep.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    whole, first = make_trainer(feature, strategy), make_trainer(feature, strategy)
    whole.callbacks = [onlooker]
    if "schedule" in FEATURES[feature].options:  # of ten steps, which are fifteen here
        for one in (whole, first):
            assert one.schedule is not None
            vars(one.schedule.scheduler)["total_steps"] = 15
    expected = fit_for_long(whole)
    taking = Taking(**PLACES[place])
    first.callbacks = [
        lockstep.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
        taking,
    ]
    with pytest.raises(ZeroDivisionError):
        fit_for_long(first)
    assert taking.state is not None
    second = make_trainer(feature, strategy, seed=1)
    second.callbacks = [again]
    second.load_state_dict(through_files(taking.state))
    found = fit_for_long(second)
    assert found == expected
    ends = [TrainingState.of(one.state_dict()) for one in (whole, second)]
    assert first_difference(ends[0], ends[1]) is None
    assert (again.best, again.best_epoch) == (onlooker.best, onlooker.best_epoch)


def test_a_fit_goes_on_on_another_number_of_devices() -> None:
    def make(number: int, seed: int) -> lockstep.Trainer:
        torch.manual_seed(seed)
        return lockstep.Trainer(
            make_model(),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(optim.Adam, lr=1e-2),
            metrics=multiclass_metrics(),
            strategy=SHARES[number](),
        )

    whole, first, second = make(2, 0), make(1, 0), make(0, 1)
    taking = Taking(step=7)
    first.callbacks = [taking]
    with pytest.raises(ZeroDivisionError):
        fit_for_long(first)
    assert taking.state is not None
    second.load_state_dict(through_files(taking.state))
    assert fit_for_long(second) == fit_for_long(whole)
    states = [TrainingState.of(one.state_dict()) for one in (whole, second)]
    assert first_difference(states[0], states[1]) is None


class Asking(lockstep.Callback):
    """Asks without a word before, in the second epoch."""

    def __init__(self, method: str) -> None:
        self._epoch = 0
        vars(self)[method] = self._ask

    def acts_in(self, method: str) -> bool:
        return method.startswith("on_train_batch") or super().acts_in(method)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.state_dict()
        self._epoch = epoch + 1

    def _ask(self, batch: int, logs: Any = None) -> None:
        if self._epoch and batch:
            self.trainer.state_dict()


@pytest.mark.parametrize("method", ["on_train_batch_begin", "on_train_batch_end"])
def test_a_state_that_could_not_be_gone_on_from_is_refused(method: str) -> None:
    trainer = make_trainer("Adam", "single")
    trainer.callbacks = [Asking(method)]
    with pytest.raises(CheckpointError, match="takes_state"):
        fit(trainer, 2)


class Reading(lockstep.Callback):
    """Reads a slot of the optimizer before and after steps, and after epochs."""

    def __init__(self, announced: int) -> None:
        self._announced = announced
        self.seen: list[float | None] = []

    def takes_state(self, batch: int) -> bool:
        return batch == self._announced

    def _read(self) -> None:
        optimizer = self.trainer.optimizer
        assert isinstance(optimizer, optim.Optimizer)
        try:
            self.seen.append(float(optimizer.state[next(self.model.parameters())]["step"]))
        except lockstep.errors.OptionError:
            self.seen.append(None)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch:
            self._read()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._read()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._read()


@pytest.mark.thorough
def test_slots_are_read_where_they_are_complete() -> None:
    seen = []
    for strategy in (lockstep.SingleDeviceStrategy(), lockstep.MirroredStrategy(2)):
        reading = Reading(announced=1)
        lockstep.Trainer(
            nn.Linear(3, 2),
            loss=nn.MSELoss(),
            optimizer=optim.Adam,
            strategy=strategy,
            callbacks=[reading],
        ).fit((torch.randn(12, 3), torch.randn(12, 2)), batch_size=4, verbose=0)
        seen.append(reading.seen)
    assert seen == [[1, 1, 2, 2, 3, 3], [None, None, 2, None, None, 3]]


def test_a_fit_is_gone_on_with_as_it_was_begun() -> None:
    trainer, taking = make_trainer("Adam", "single"), Taking(step=2)
    trainer.callbacks = [taking]
    with pytest.raises(ZeroDivisionError):
        fit(trainer)
    assert taking.state is not None
    second = make_trainer("Adam", "single")
    second.load_state_dict(taking.state)
    with pytest.raises(lockstep.errors.OptionError, match="batch_size=3 after batches of 12"):
        second.fit((X, Y), batch_size=3, verbose=0)
    with pytest.raises(lockstep.errors.OptionError, match="only be iterated"):
        second.fit(lambda: iter([(X[:12], Y[:12])]), verbose=0)
    # Until then it has the place that it was given.
    assert second.state_dict()["position"]["fit"]["batch"] == 3
