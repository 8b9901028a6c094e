"""Learning rates follow the batch size when asked to, once, and are said."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import errors

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(1))


def make_trainer(strategy: lockstep.Strategy | None = None) -> lockstep.Trainer:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    groups = [
        {"params": model[0].parameters(), "lr": 0.01},
        {"params": model[2].parameters(), "lr": 0.002},
    ]
    return lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(groups),
        strategy=strategy,
    )


def rates(trainer: lockstep.Trainer) -> list[float]:
    assert trainer.optimizer is not None
    return [group["lr"] for group in trainer.optimizer.param_groups]


def fit(trainer: lockstep.Trainer, batch_size: int, rule: Any = None, **options: Any) -> None:
    trainer.fit(
        (X, Y), batch_size=batch_size, learning_rate_rule=rule, verbose=0, shuffle=False, **options
    )


def test_nothing_is_scaled_unasked() -> None:
    trainer = make_trainer()
    fit(trainer, 64)
    assert rates(trainer) == [0.01, 0.002]
    assert trainer.batch_size == 64


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", 2.0**0.5)])
def test_every_group_is_scaled(rule: str, factor: float) -> None:
    trainer = make_trainer()
    fit(trainer, 64, rule)
    assert rates(trainer) == pytest.approx([0.01 * factor, 0.002 * factor])


def test_the_reference_is_the_users() -> None:
    trainer = make_trainer()
    fit(trainer, 16, "linear", reference_batch_size=8)
    assert rates(trainer) == pytest.approx([0.02, 0.004])


def test_a_second_fit_of_the_same_size_scales_nothing() -> None:
    trainer = make_trainer()
    for rule in ("linear", "linear", None):
        fit(trainer, 64, rule)
        assert rates(trainer) == pytest.approx([0.02, 0.004])


def test_another_size_is_scaled_from_what_the_rates_were_meant_for() -> None:
    trainer = make_trainer()
    for size in (64, 16, 32):
        fit(trainer, size, "linear")
        assert rates(trainer) == pytest.approx([0.01 * size / 32, 0.002 * size / 32])


def test_rates_that_the_user_sets_in_between_stay() -> None:
    trainer = make_trainer()
    fit(trainer, 64, "linear")
    assert trainer.optimizer is not None
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    fit(trainer, 64, "linear")
    assert rates(trainer) == pytest.approx([0.5, 0.004])


def test_a_saved_optimizer_is_not_scaled_again() -> None:
    first, second = make_trainer(), make_trainer()
    fit(first, 64, "linear")
    assert first.optimizer is not None
    assert second.optimizer is not None
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    fit(second, 64, "linear")
    assert rates(second) == rates(first) == pytest.approx([0.02, 0.004])


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_the_weights_are_those_of_a_plain_loop_with_scaled_rates(devices: int) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 3).double()
    plain = nn.Linear(4, 3).double()
    plain.load_state_dict(model.state_dict())
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        strategy=lockstep.MirroredStrategy(devices),
        precision="fp64",
    )
    fit(trainer, 20, "sqrt", reference_batch_size=5)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for start in range(0, 64, 20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            plain(X[start : start + 20].double()), Y[start : start + 20]
        )
        loss.backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).norm() <= 1e-12


def test_what_is_done_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer()
    for _ in range(2):
        trainer.fit((X, Y), batch_size=64, learning_rate_rule="linear")
    said = [line for line in capsys.readouterr().out.splitlines() if "learning rate" in line]
    how = "x 2 for batch_size 64, by the linear rule from 32"
    assert said == [
        f"learning rate is 0.02, 0.004: {how}",
        f"learning rate stays 0.02, 0.004: {how}",
    ]


def test_other_rules_are_refused() -> None:
    message = "2 problems(.|\n)*`learning_rate_rule` must be.*'cubic'(.|\n)*`reference_batch_size`"
    with pytest.raises(errors.OptionError, match=message):
        fit(make_trainer(), 64, "cubic", reference_batch_size=0)


def test_the_reference_is_checked_also_where_no_rule_asks_for_it() -> None:
    with pytest.raises(errors.OptionError, match=r"`reference_batch_size` must be.*2\.5"):
        fit(make_trainer(), 64, reference_batch_size=2.5)


def test_a_reference_without_a_rule_would_be_ignored() -> None:
    with pytest.raises(lockstep.LockstepError, match="reference_batch_size=8 without a rule"):
        make_trainer().fit((X, Y), batch_size=16, reference_batch_size=8, verbose=0)
