"""Training steps of the user's own: one function, or several that take turns."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.errors import LockstepError, NonFiniteLossError, OptionError
from lockstep.strategies.base import Strategy
from tests.thorough import core_of
from tests.zoo import build_seeded

pytestmark = pytest.mark.thorough

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": lockstep.SingleDeviceStrategy,
    "mirrored-2": partial(lockstep.MirroredStrategy, 2),
    "mirrored-3": partial(lockstep.MirroredStrategy, 3),
    "sharded-2": partial(lockstep.FullyShardedStrategy, 2),
    "sharded-2-gloo": partial(lockstep.FullyShardedStrategy, 2, engine="gloo"),
    "sharded-2-gradients": partial(lockstep.FullyShardedStrategy, 2, level="gradients"),
    "mirrored-2-shares-5": partial(lockstep.MirroredStrategy, 2, num_shares=5),
}

REAL = torch.randn(44, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64) + 1
NOISE = torch.randn(44, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
BATCH = 20  # no number of shares divides it, and the last batch is short


class Gan(nn.Module):
    """A pair of nets without a forward pass of their own."""

    def __init__(self, *, normalised: bool = False) -> None:
        super().__init__()
        norm: nn.Module = nn.BatchNorm1d(16) if normalised else nn.Identity()
        self.generator = nn.Sequential(nn.Linear(3, 16), norm, nn.Tanh(), nn.Linear(16, 5))
        self.discriminator = nn.Sequential(nn.Linear(5, 160), nn.Tanh(), nn.Linear(160, 1))


def discriminate(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    noise, real = batch
    right = model.discriminator(real)
    wrong = model.discriminator(model.generator(noise))
    return (F.softplus(-right) + F.softplus(wrong)).squeeze(1)


def generate(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.softplus(-model.discriminator(model.generator(batch[0]))).mean()


STEPS: dict[str, Callable[[Any, Any], Tensor]] = {
    "discriminator": discriminate,
    "generator": generate,
}
OPTIMIZERS: dict[str, Any] = {
    "discriminator": partial(torch.optim.Adam, lr=1e-2, eps=1e-3),
    "generator": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def train_gan(strategy: Strategy, *, normalised: bool = False, fits: int = 1) -> Any:
    trainer = lockstep.Trainer(
        build_seeded(partial(Gan, normalised=normalised)),
        train_step=STEPS,
        optimizer=OPTIMIZERS,
        strategy=strategy,
        precision="fp64",
    )
    for _ in range(fits):
        history = trainer.fit((NOISE, REAL), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return trainer, history.history


def train_gan_plainly(*, normalised: bool = False, fits: int = 1) -> tuple[Gan, list[float]]:
    model = build_seeded(partial(Gan, normalised=normalised)).double()
    assert isinstance(model, Gan)
    optimizers = {
        name: make(getattr(model, name).parameters()) for name, make in OPTIMIZERS.items()
    }
    sums: list[float] = []
    for _ in range(2 * fits):
        sums = [0.0, 0.0]
        for start in range(0, len(REAL), BATCH):
            batch = NOISE[start : start + BATCH], REAL[start : start + BATCH]
            for turn, (name, step) in enumerate(STEPS.items()):
                model.zero_grad()
                loss = step(model, batch).mean()
                loss.backward()
                optimizers[name].step()
                sums[turn] += loss.item() * len(batch[0])
    return model, [total / len(REAL) for total in sums]


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    other = theirs.state_dict()
    scale = torch.cat([value.double().flatten() for value in other.values()]).norm()
    for name, value in ours.state_dict().items():
        difference = (value - other[name]).double().norm()
        assert difference <= 1e-12 * max(other[name].double().norm(), scale), name


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored-3"], []))
def test_two_optimizers_take_turns(strategy: str, normalised: bool) -> None:
    trainer, history = train_gan(STRATEGIES[strategy](), normalised=normalised, fits=2)
    model, losses = train_gan_plainly(normalised=normalised, fits=2)
    assert_same(trainer.model, model)
    assert history["discriminator_loss"][-1] == pytest.approx(losses[0], rel=1e-12)
    assert history["generator_loss"][-1] == pytest.approx(losses[1], rel=1e-12)
    assert history["loss"][-1] == pytest.approx(sum(losses), rel=1e-12)
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


class Encoder(nn.Module):
    """Contrasts two views of a sample, drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 4))


def pull_together(model: Encoder, batch: Tensor) -> tuple[Tensor, int]:
    one, other = model.net(batch), model.net(batch * 0.9)
    return (one - other).square().sum(), 3 * len(batch)


def test_one_function_on_inputs_alone() -> None:
    """The same bits on any number of devices, random numbers included."""
    found = []
    for devices in (1, 2, 3):
        model = build_seeded(Encoder)
        trainer = lockstep.Trainer(
            model,
            train_step=pull_together,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            strategy=lockstep.MirroredStrategy(devices, num_shares=3),
            schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
            clip_norm=0.05,
            accumulate=2,
        )
        history = trainer.fit((REAL,), batch_size=BATCH, epochs=3, verbose=0).history
        found.append((history, [one.detach().clone() for one in model.parameters()]))
    for history, weights in found[1:]:
        assert history == found[0][0]
        assert all(own.equal(other) for own, other in zip(weights, found[0][1], strict=True))
    assert found[0][0]["lr"] == [0.1, 0.05, 0.025]


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets, weights = batch
    errors = (model(inputs) - targets).square().mean(1)
    return (errors * weights).sum(), weights.sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_function_weighs_its_samples_itself(strategy: str) -> None:
    weights = torch.arange(44, dtype=torch.float64) % 4
    ours, theirs = build_seeded(lambda: nn.Linear(3, 5)), build_seeded(lambda: nn.Linear(3, 5))
    trainer = lockstep.Trainer(
        ours,
        train_step=weighted,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=STRATEGIES[strategy](),
        precision="fp64",
    )
    data = (NOISE, REAL, weights)
    history = trainer.fit(
        data, batch_size=BATCH, shuffle=False, verbose=0, validation_data=(NOISE, REAL)
    )
    assert "val_loss" in history.history
    theirs.double()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for start in range(0, 44, BATCH):
        total, weight = weighted(theirs, tuple(part[start : start + BATCH] for part in data))  # type: ignore[arg-type]
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
    assert_same(ours, theirs)


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Asks for gradients of the weights, and differentiates these again."""
    errors = (model(batch[0]) - batch[1]).square().mean(1)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(errors.mean(), weights, create_graph=True)
    unused = torch.autograd.grad(model(batch[0]).sum(), weights[:1], allow_unused=True)
    assert unused[0] is not None
    penalty: Tensor = sum((one.square().sum() for one in gradients), start=unused[0].norm())
    result: Tensor = errors + penalty
    return result


def test_a_step_asks_for_gradients_of_weights_that_are_divided() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))

    ours, theirs = build_seeded(make), build_seeded(make).double()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    trainer = lockstep.Trainer(
        ours,
        train_step=penalised,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.TensorParallelStrategy(2),
        precision="fp64",
    )
    trainer.fit((NOISE, REAL), batch_size=BATCH, shuffle=False, verbose=0)
    for start in range(0, 44, BATCH):
        batch = NOISE[start : start + BATCH], REAL[start : start + BATCH]
        optimizer.zero_grad()
        penalised(theirs, batch).mean().backward()
        optimizer.step()
    assert_same(ours, theirs)


def infinite(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = model.generator(batch[0] / 0).mean()
    return loss


def test_what_is_not_finite_is_named() -> None:
    trainer = lockstep.Trainer(
        build_seeded(Gan),
        train_step={"discriminator": discriminate, "generator": infinite},
        optimizer=OPTIMIZERS,
        strategy=lockstep.MirroredStrategy(2),
    )
    with pytest.raises(NonFiniteLossError, match=r"first in the output of layer 'generator\.0'"):
        trainer.fit((NOISE, REAL), batch_size=BATCH, verbose=0)


def test_a_turn_that_is_left_out_counts() -> None:
    trainer = lockstep.Trainer(
        build_seeded(Gan),
        train_step=STEPS,
        optimizer=OPTIMIZERS,
        strategy=lockstep.MirroredStrategy(2),
        on_nonfinite="skip",
        callbacks=[lockstep.callbacks.EarlyStopping("generator_loss", patience=5)],
    )
    history = trainer.fit((NOISE, REAL * torch.nan), batch_size=BATCH, verbose=0).history
    assert history["skipped_steps"] == [3]


def make(**options: Any) -> lockstep.Trainer:
    return lockstep.Trainer(
        build_seeded(Gan), **{"train_step": STEPS, "optimizer": OPTIMIZERS, **options}
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_step": "gan"}, "must be a function of model and batch"),
        ({"train_step": {"generator": generate}}, "must have the same names"),
        ({"optimizer": torch.optim.SGD}, "Several optimizers need as many functions"),
        ({"train_step": generate}, "Several optimizers need as many functions"),
        ({"average": lockstep.EMA()}, "it needs one optimizer"),
        ({"precision": "bf16"}, "it needs one optimizer"),
        ({"compile": True}, "cannot tell which to compile"),
        (
            {
                "train_step": {"a": generate, "generator": generate},
                "optimizer": {"a": torch.optim.SGD, "generator": torch.optim.SGD},
            },
            "no submodule 'a'",
        ),
        (
            {
                "train_step": {"generator": generate, "generator.0": generate},
                "optimizer": {"generator": torch.optim.SGD, "generator.0": torch.optim.SGD},
            },
            "Every parameter must have one optimizer",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**options)


def test_stages_have_no_steps_of_the_users() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    trainer = lockstep.Trainer(
        model,
        train_step=weighted,
        optimizer=torch.optim.SGD,
        strategy=lockstep.PipelineStrategy(2, microbatches=2),
    )
    with pytest.raises(OptionError, match="train_step with a pipeline"):
        trainer.fit((NOISE.float(), REAL.float(), torch.ones(44)), batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("strategy", [lockstep.AutoStrategy(), lockstep.TensorParallelStrategy(2)])
def test_a_model_that_cannot_be_called_on_its_data_is_planned_by_no_cost(strategy: Any) -> None:
    optimizers = dict.fromkeys(OPTIMIZERS, torch.optim.SGD)
    trainer = make(optimizer=optimizers, strategy=strategy)
    with pytest.raises(OptionError, match=r"plans by the model's `forward`.*NotImplementedError"):
        trainer.fit((NOISE.float(), REAL.float()), batch_size=BATCH, verbose=0)


def test_validation_needs_a_loss_and_a_mean_of_weights_its_weight() -> None:
    with pytest.raises(OptionError, match="needs a loss"):
        make().fit((NOISE, REAL), validation_data=(NOISE, REAL), verbose=0)
    with pytest.raises(LockstepError, match=r"return the weight of its loss.*beside the inputs"):
        make(train_step={"discriminator": generate, "generator": generate}).fit(
            (NOISE.float(), REAL.float(), torch.ones(44)), verbose=0
        )
