"""Ranks that share no memory, over a process group of torch.distributed: what one device trains.

The parity table has rows for this engine. Here: the same bits as in shared memory, what lies beside
the weights, and what callbacks change. Kills are in ``tests/faults/test_kills.py``.
"""

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.transports.process_group_transport import ProcessGroupTransport
from lockstep.errors import OptionError
from tests.thorough import core_of
from tests.zoo import case

pytestmark = pytest.mark.thorough

GLOO = partial(lockstep.MirroredStrategy, engine="gloo")
STAGES = lockstep.PipelineStrategy(2, microbatches=2, engine="gloo")


def trained(
    name: str, strategy: lockstep.MirroredStrategy, precision: str = "fp32", **options: Any
) -> dict[str, Tensor]:
    """Weights, buffers and slots after two calls of ``fit``."""
    job = case(name)
    model = job.make_model()
    trainer = lockstep.Trainer(
        model,
        loss=job.loss,
        optimizer=job.optimizer,
        strategy=strategy,
        precision=precision,
        seed=3,
        **options,
    )
    data = job.inputs, job.targets
    for _ in range(2):
        trainer.fit(data, batch_size=job.batch_size, validation_data=data, verbose=0)
    slots = trainer.optimizer.state_dict()["state"]
    return {
        **{name: value.clone() for name, value in model.state_dict().items()},
        **{
            f"slot {number} {slot}": torch.as_tensor(value).clone()
            for number, own in slots.items()
            for slot, value in own.items()
        },
    }


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@functools.cache
def in_shared_memory(name: str) -> dict[str, Tensor]:
    return trained(name, lockstep.MirroredStrategy(1, num_shares=8))


# Buffers, tied weights, layers of which activations are exchanged, skip connections.
FEW = ("cnn_batch_norm", "gpt_tied", "wide", "unet")


@pytest.mark.parametrize(
    ("name", "devices"),
    core_of(
        [*((name, 2) for name in FEW), ("wide", 4), ("cnn_batch_norm", 8)],
        [("cnn_batch_norm", 2), ("wide", 2)],
        [],
    ),
)
def test_the_bits_are_those_of_shared_memory(name: str, devices: int) -> None:
    """Weights of layers whose factors are exchanged included: every rank forms all of these."""
    assert_same_bits(trained(name, GLOO(devices, num_shares=8)), in_shared_memory(name))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},  # float32 copies of the weights
        {"precision": "bf16-mixed"},
        {"precision": "fp16-mixed"},  # a loss scale
        {"average": lockstep.EMA(0.9)},
        {"clip_norm": 0.1},
        {"accumulate": 3},
    ],
    ids=lambda options: next(iter(options)) + " " + str(next(iter(options.values()))),
)
def test_what_lies_beside_the_weights(options: dict[str, Any]) -> None:
    expected = trained("mlp", lockstep.MirroredStrategy(2), **options)
    assert_same_bits(trained("mlp", GLOO(2), **options), expected)


class _Meddler(lockstep.Callback):
    """Changes weights and the learning rate between steps, and looks at slots and weights."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 1:
            self.trainer.optimizer.param_groups[0]["lr"] *= 0.5
            with torch.no_grad():
                next(self.trainer.model.parameters()).mul_(0.9)
        self.seen += [parameter.detach().clone() for parameter in self.trainer.model.parameters()]

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if epoch == 0:
            for parameter in self.trainer.model.parameters():
                parameter.data = parameter.data * 0.5


def test_what_callbacks_change_comes_to_all_ranks() -> None:
    seen = []
    for strategy in (lockstep.MirroredStrategy(2), GLOO(2)):
        meddler = _Meddler()
        trained("mlp", strategy, callbacks=[meddler])
        seen.append(meddler.seen)
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(map(torch.equal, *seen))


def test_evaluate_and_predict() -> None:
    job = case("mlp")
    results = []
    for strategy in (lockstep.SingleDeviceStrategy(), GLOO(3)):
        trainer = lockstep.Trainer(
            job.make_model(), loss=job.loss, strategy=strategy, precision="fp64"
        )
        loss = trainer.evaluate((job.inputs, job.targets), batch_size=7)["loss"]
        results.append((loss, trainer.predict(job.inputs, batch_size=7)))
    (expected_loss, expected), (loss, outputs) = results
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("width", [300, 5000], ids=["packed", "in buckets"])
def test_a_ring_sends_no_less(devices: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank sends the others their gradients, and then what it has updated, and no more."""
    sent: list[int] = []
    all_to_all, send = ProcessGroupTransport._all_to_all, ProcessGroupTransport.send

    def counted(self: ProcessGroupTransport, into: Tensor, *others: Any) -> None:
        sent.append(others[1].nbytes)
        all_to_all(self, into, *others)

    def counted_one(self: ProcessGroupTransport, peer: int, tensors: Any, tag: int) -> Any:
        sent.append(sum(tensor.nbytes for tensor in tensors))
        return send(self, peer, tensors, tag)

    monkeypatch.setattr(ProcessGroupTransport, "_all_to_all", counted)
    monkeypatch.setattr(ProcessGroupTransport, "send", counted_one)
    model = torch.nn.Sequential(torch.nn.Linear(512, width), torch.nn.Linear(width, 1))
    trainer = lockstep.Trainer(
        model,
        loss=torch.nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=GLOO(devices),
    )
    trainer.fit((torch.ones(24, 512), torch.ones(24, 1)), batch_size=8, verbose=0)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    ring = 2 * (devices - 1) / devices * num_bytes
    assert 0.99 * ring < sum(sent) / 3 < 1.01 * ring


def test_the_plan_says_so() -> None:
    job = case("mlp")
    plan = GLOO(2).plan(job.make_model(), batch_size=8)
    assert "over gloo" in str(plan)
    assert lockstep.Plan.from_json(plan.to_json()) == plan
    assert isinstance(job.inputs, Tensor)
    assert "over gloo" in str(STAGES.plan(job.make_model(), batch_size=8, sample=job.inputs[:1]))
    alone = GLOO(1).plan(job.make_model(), batch_size=8)
    assert "gloo" not in str(alone)


@pytest.mark.parametrize("engine", ["nccl", "shared", 1, ""])
def test_another_engine_is_refused(engine: Any) -> None:
    with pytest.raises(OptionError, match=r"engine=.*Use (one of |engine=.)gloo"):
        lockstep.MirroredStrategy(2, engine=engine)


def test_a_fit_without_a_step_leaves_all_as_it_was() -> None:
    """Its groups were never used; the optimizer's slots are brought together all the same."""

    class Stop(lockstep.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.trainer.stop_training = True

    model = nn.Linear(3, 2)
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam,
        strategy=lockstep.MirroredStrategy(2, engine="gloo"),
    )
    data = torch.randn(8, 3), torch.randn(8, 2)
    trainer.fit(data, batch_size=4, verbose=0)
    before = trainer.optimizer.state[model.weight]["exp_avg"].clone()
    trainer.callbacks.append(Stop())
    assert trainer.fit(data, batch_size=4, verbose=0).history == {}
    assert torch.equal(trainer.optimizer.state[model.weight]["exp_avg"], before)


def test_a_callback_freezes_a_layer_at_the_end_of_the_last_epoch() -> None:
    class Freeze(lockstep.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            next(self.model.parameters()).requires_grad_(False)

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam,
        strategy=lockstep.MirroredStrategy(2, engine="gloo"),
        callbacks=[Freeze()],
    )
    trainer.fit((torch.randn(8, 3), torch.randn(8, 2)), batch_size=4, verbose=0)
    slots = trainer.optimizer.state[model[0].weight]
    assert slots["step"] == 2
    assert slots["exp_avg"].any()
