"""The parity table on TPUs: every strategy against a plain loop on a CPU, in fp64.

Not ``lockstep.verify``, whose plain loop would run on the TPU as well.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.strategies.base import Strategy
from tests.tpu.training import States, fit, make_trainer, plain
from tests.zoo import case

TOLERANCE = 1e-12

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": lambda: lockstep.SingleDeviceStrategy("tpu:0"),
    "mirrored-1": lambda: lockstep.MirroredStrategy(["tpu:0"]),
    "tpu-1-shares-2": lambda: lockstep.TPUStrategy(1, num_shares=2),
    "tpu-2": lockstep.TPUStrategy,
    "pipeline-2": lambda: lockstep.PipelineStrategy(2, microbatches=2, devices=["tpu:0", "tpu:1"]),
}

# Stages normalise microbatches, so models with BatchNorm stay whole. The LSTM has an embedding.
ROWS = [
    ("mlp", "single"),
    ("mlp", "tpu-2"),
    ("mlp", "pipeline-2"),
    ("cnn_batch_norm", "mirrored-1"),
    ("cnn_batch_norm", "tpu-1-shares-2"),
    ("cnn_batch_norm", "tpu-2"),
    ("gpt_tied", "mirrored-1"),
    ("gpt_tied", "tpu-2"),
    ("gpt_tied", "pipeline-2"),
    ("lstm", "mirrored-1"),
    ("lstm", "tpu-2"),
]


def check_equal(found: States, expected: States) -> None:
    """All tensors of floats together, and integers each by itself."""
    floats = [name for name, value in expected.items() if value.is_floating_point()]
    whole, other = (
        torch.cat([one[name].flatten() for name in floats]) for one in (expected, found)
    )
    assert float((other - whole).norm() / whole.norm()) <= TOLERANCE
    for name in expected.keys() - set(floats):
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize(("model", "strategy"), ROWS)
def test_training_equals_a_plain_loop_on_a_cpu(model: str, strategy: str) -> None:
    one = case(model)
    check_equal(fit(one, make_trainer(one, STRATEGIES[strategy]())), plain(one))


def test_running_statistics_are_those_of_a_cpu() -> None:
    """Each buffer for itself: of all tensors together they are a small part."""
    one = case("cnn_batch_norm")
    found, expected = fit(one, make_trainer(one, lockstep.TPUStrategy(1))), plain(one)
    running = [name for name in expected if "running" in name]
    assert running
    for name in running:
        torch.testing.assert_close(found[name], expected[name], rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("strategy", ["mirrored-1", "tpu-2"])
def test_evaluation_prediction_and_files(strategy: str, tmp_path: Path) -> None:
    one = case("cnn_batch_norm")
    trainers = [make_trainer(one, lockstep.SingleDeviceStrategy("cpu"))]
    trainers.append(make_trainer(one, STRATEGIES[strategy]()))
    evaluated, predicted = [], []
    for trainer in trainers:
        fit(one, trainer)
        data = one.inputs, one.targets
        evaluated.append(trainer.evaluate(data, batch_size=one.batch_size)["loss"])
        predicted.append(trainer.predict(one.inputs, batch_size=one.batch_size).cpu())
    assert evaluated[1] == pytest.approx(evaluated[0], rel=TOLERANCE)
    assert float((predicted[1] - predicted[0]).norm() / predicted[0].norm()) <= TOLERANCE
    trainers[1].save(tmp_path / "weights")
    trainers[0].load(tmp_path / "weights")
    saved = trainers[0].model.state_dict()
    for name, value in trainers[1].model.state_dict().items():
        assert torch.equal(saved[name], value.cpu())


@pytest.mark.parametrize("names", [("cpu", "tpu"), ("tpu", "cpu")], ids=["to TPU", "from TPU"])
def test_a_training_resumes_from_a_checkpoint_of_other_devices(
    names: tuple[str, str], tmp_path: Path
) -> None:
    one = case("gpt_tied")
    strategies: dict[str, Callable[[], Strategy]] = {
        "cpu": lambda: lockstep.MirroredStrategy(["cpu", "cpu"]),
        "tpu": lambda: lockstep.TPUStrategy(1, num_shares=2),
    }
    checkpoint = lockstep.Checkpoint(tmp_path, every="epoch")
    fit(one, make_trainer(one, strategies[names[0]]()), epochs=1, checkpoint=checkpoint)
    found = fit(one, make_trainer(one, strategies[names[1]]()), epochs=2, checkpoint=checkpoint)
    check_equal(found, fit(one, make_trainer(one, strategies["cpu"]()), epochs=2))


def test_samples_are_read_ahead_in_processes() -> None:
    """They are forks of a rank that uses its TPU, and do not use it themselves."""
    one = case("mlp")
    assert isinstance(one.inputs, torch.Tensor)
    dataset = torch.utils.data.TensorDataset(one.inputs, one.targets)
    trainer = make_trainer(one, lockstep.TPUStrategy(1))
    trainer.fit(
        lockstep.data.prefetch(dataset, workers=1),
        batch_size=one.batch_size,
        shuffle=False,
        verbose=0,
    )
    found = {name: value.cpu() for name, value in trainer.model.state_dict().items()}
    check_equal(found, plain(one))


def test_dropout_draws_by_share() -> None:
    """The same bits on one TPU and on two, and the script's own stream stays where it was."""
    one = case("cnn_dropout")
    torch.manual_seed(5)
    before = torch.rand(3, device="tpu").cpu()
    torch.manual_seed(5)
    states = [
        fit(one, make_trainer(one, lockstep.TPUStrategy(count, num_shares=2))) for count in (1, 2)
    ]
    assert torch.equal(torch.rand(3, device="tpu").cpu(), before)
    check_equal(states[1], states[0])
