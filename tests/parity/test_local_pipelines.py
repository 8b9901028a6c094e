"""Pipelines that train apart and average: held to plain loops that simulate whole replicas."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.errors import DeviceError, OptionError
from tests.parity.test_local_sgd import fit, local_case, local_trainer, simulate
from tests.thorough import core_of
from tests.zoo import case, make_job

pytestmark = pytest.mark.thorough

TWO = partial(lockstep.LocalSGDStrategy, devices=4, stages=2, microbatches=2)

STRATEGIES = {
    "every-3-on-2x2": TWO(3),
    "diloco-on-2x2": TWO(2, outer=lockstep.Nesterov()),
    "epoch-on-3x2": lockstep.LocalSGDStrategy("epoch", 6, stages=2, microbatches=2),
    "interleaved": TWO(2, schedule="interleaved"),
    "zb-h1": TWO(2, schedule="zb-h1"),
    "one-replica-with-diloco": lockstep.LocalSGDStrategy(
        2, 3, stages=3, outer=lockstep.Nesterov(lr=0.5, momentum=0.5)
    ),
}
MODELS = ("mlp", "cnn_dropout", "gpt_tied")


@pytest.mark.parametrize("strategy", core_of(list(STRATEGIES), list(STRATEGIES)[:3]))
@pytest.mark.parametrize("model", core_of(MODELS, MODELS[2:]))
def test_every_step_equals_simulated_replicas(model: str, strategy: str) -> None:
    report = lockstep.verify(make_job(local_case(model)), STRATEGIES[strategy], steps=8)
    assert report.passed, str(report)
    assert "simulates" in report.title
    assert "the result is not that of one device" in str(report)


def test_statistics_are_those_of_a_replica_where_it_has_one_microbatch() -> None:
    strategy = lockstep.LocalSGDStrategy(3, 4, stages=2, microbatches=1)
    report = lockstep.verify(make_job(local_case("cnn_batch_norm")), strategy, steps=8)
    assert report.passed, str(report)


@pytest.mark.parametrize("model", ["mlp", "gpt_tied"])
def test_averaging_every_step_of_plain_sgd_is_synchronous(model: str) -> None:
    one = replace(case(model), optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=1e-2))
    report = lockstep.verify(make_job(one), TWO(1), steps=5)
    assert report.passed, str(report)
    assert "simulates" not in report.title


@pytest.mark.parametrize(("model", "every"), [("mlp", 2), ("gpt_tied", "epoch")])
def test_training_without_meeting_equals_a_plain_loop(model: str, every: Any) -> None:
    one = case(model)
    trainer = local_trainer(one, TWO(every))
    data = (one.inputs, one.targets)
    history = fit(trainer, one, shuffle=False, validation_data=data)
    expected, losses = simulate(one, 2, every, epochs=2)
    torch.testing.assert_close(
        trainer.model.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12
    )
    assert history["loss"] == pytest.approx(losses, rel=1e-12)
    val_loss = trainer.evaluate(data, batch_size=one.batch_size)["loss"]
    assert history["val_loss"][-1] == pytest.approx(val_loss, rel=1e-12)
    alone = trainer.model(one.inputs)
    torch.testing.assert_close(trainer.predict(one.inputs, batch_size=7), alone, rtol=0, atol=1e-12)


@pytest.mark.exhaustive
def test_a_second_fit_and_a_loaded_state_go_on() -> None:
    one = replace(case("gpt_tied"), optimizer=partial(torch.optim.SGD, lr=1e-2))
    make = partial(local_trainer, one, STRATEGIES["diloco-on-2x2"])
    whole, halves, loaded = make(), make(), make()
    fit(whole, one, 4)
    fit(halves, one)
    state = halves.state_dict()
    assert state["velocities"].keys() == dict(halves.model.named_parameters()).keys()
    assert all(bool(velocity.any()) for velocity in state["velocities"].values())
    fit(halves, one)
    loaded.load_state_dict(state)
    fit(loaded, one)
    expected = whole.model.state_dict()
    torch.testing.assert_close(halves.model.state_dict(), expected, rtol=0, atol=0)
    torch.testing.assert_close(loaded.model.state_dict(), expected, rtol=0, atol=0)


class _Stop(lockstep.Callback):
    """Fails after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyError("the end")


@pytest.mark.exhaustive
@pytest.mark.parametrize("outer", core_of([None, lockstep.Nesterov()], [lockstep.Nesterov()], []))
def test_a_checkpoint_has_the_optimizer_of_each_replica(outer: Any, tmp_path: Path) -> None:
    one = case("gpt_tied")
    one = replace(one, optimizer=partial(torch.optim.Adam, lr=1e-3))
    # Where it is cut decides how sums of gradients are rounded that are nothing but rounding.
    make = partial(local_trainer, one, TWO(2, outer=outer, cuts=["blocks.1"]))
    whole, first, second = make(), make(), make()
    fit(whole, one, 3)
    checkpoint = partial(lockstep.Checkpoint, tmp_path, every="2 steps")
    first.callbacks = [_Stop(7)]
    with pytest.raises(KeyError):
        fit(first, one, 3, checkpoint=checkpoint())
    fit(second, one, 3, checkpoint=checkpoint())
    expected = whole.model.state_dict()
    torch.testing.assert_close(second.model.state_dict(), expected, rtol=0, atol=0)


def test_replicas_of_one_device_are_no_pipelines_to_a_checkpoint(tmp_path: Path) -> None:
    one = replace(case("mlp"), optimizer=partial(torch.optim.Adam, lr=0.0))
    checkpoint = partial(lockstep.Checkpoint, tmp_path, every="2 steps")
    begun = local_trainer(one, lockstep.LocalSGDStrategy(2, 4), callbacks=[_Stop(3)])
    with pytest.raises(KeyError):
        fit(begun, one, 1, checkpoint=checkpoint())
    loss = fit(local_trainer(one, TWO(2)), one, 1, checkpoint=checkpoint())["loss"]
    expected = fit(local_trainer(one, lockstep.SingleDeviceStrategy()), one, 1)["loss"]
    assert loss == pytest.approx(expected, rel=1e-12)  # every sample counts once


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 3, "stages": 2}, "devices=2, for example"),
        ({"devices": 2, "stages": 0}, "stages=0"),
        ({"devices": 2, "microbatches": 4}, "microbatches=4"),
        ({"devices": 2, "cuts": ["a"]}, "need `stages`"),
        ({"devices": 2, "stages": 2, "schedule": "x"}, "schedule='x'"),
        ({"devices": 2, "stages": 2, "cuts": "a"}, "cuts='a'"),
        ({"devices": 2, "stages": 2, "average_optimizer": True}, "average_optimizer=True"),
        ({"devices": 2, "stages": 2, "channels_last": False}, "channels_last=False"),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, DeviceError), match=message):
        lockstep.LocalSGDStrategy(2, **options)


def test_what_stages_cannot_do_is_refused() -> None:
    one = case("mlp")
    with pytest.raises(OptionError, match="Every microbatch needs a sample"):
        local_trainer(one, TWO(2)).fit((one.inputs, one.targets), batch_size=3, verbose=0)
