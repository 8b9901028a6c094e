"""The parity table on accelerators: every strategy against a plain loop on one device, in fp64.

Ranks that share a device exchange by way of host memory (gloo), so that one device is enough for
every row.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
import torch

import lockstep
from lockstep.strategies.base import Strategy
from tests.devices.found import KIND, ranks_on_devices
from tests.launching import STRICT, STRICT_BUT_KERAS
from tests.parity.loop_processes import KERAS_SCRIPT, SCRIPT, assert_exact, run_as_torchrun
from tests.parity.own_loop import LOOPS as ALL_LOOPS
from tests.thorough import core_of
from tests.zoo import case, cases, make_job

LOOPS = tuple(ALL_LOOPS)

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": lambda: lockstep.SingleDeviceStrategy(ranks_on_devices(1)[0]),
    "mirrored-1": lambda: lockstep.MirroredStrategy(ranks_on_devices(1)),
    "mirrored-1-shares-3": lambda: lockstep.MirroredStrategy(ranks_on_devices(1), num_shares=3),
    "mirrored-2": lambda: lockstep.MirroredStrategy(ranks_on_devices(2), engine="gloo"),
    "mirrored-4": lambda: lockstep.MirroredStrategy(ranks_on_devices(4), engine="gloo"),
    "sharded-2": lambda: lockstep.FullyShardedStrategy(ranks_on_devices(2), engine="gloo"),
    "sharded-2-slots": lambda: lockstep.FullyShardedStrategy(
        ranks_on_devices(2), level="slots", engine="gloo"
    ),
    "sharded-3-on-one": lambda: lockstep.FullyShardedStrategy(
        ranks_on_devices(1) * 3, engine="gloo"
    ),
    "tensor-2": lambda: lockstep.TensorParallelStrategy(devices=ranks_on_devices(2), engine="gloo"),
    "data-2-tensor-2": lambda: lockstep.HybridStrategy(
        2, tensor=2, devices=ranks_on_devices(4), engine="gloo"
    ),
    "hybrid-tensor-2-pipe-2": lambda: lockstep.HybridStrategy(
        pipe=2, tensor=2, microbatches=2, devices=ranks_on_devices(4), engine="gloo"
    ),
    "hybrid-shard-2-pipe-2": lambda: lockstep.HybridStrategy(
        pipe=2, shard=2, level="slots", microbatches=2, devices=ranks_on_devices(4), engine="gloo"
    ),
    "pipeline-2-zb-h1": lambda: lockstep.PipelineStrategy(
        2, microbatches=4, schedule="zb-h1", devices=ranks_on_devices(2), engine="gloo"
    ),
    "hybrid-2x2": lambda: lockstep.HybridStrategy(
        2, 2, microbatches=2, devices=ranks_on_devices(4), engine="gloo"
    ),
}

IN_STAGES = ("mlp", "gpt_tied", "unet", "wide", "two_tower")


# Beside all rows of the GPT: shares and ranks whose statistics are those of the whole batch.
CORE_ROWS = [
    ("cnn_batch_norm", strategy) for strategy in ("mirrored-1-shares-3", "mirrored-2", "sharded-2")
]


def rows() -> list[tuple[str, str]]:
    """Batch statistics over microbatches are not those of one device: such models stay whole."""
    whole = [name for name in STRATEGIES if "pipeline" not in name and "hybrid" not in name]
    return [
        *((one.name, strategy) for one in cases() for strategy in whole),
        *(
            (name, strategy)
            for name in IN_STAGES
            for strategy in STRATEGIES
            if strategy not in whole
        ),
    ]


@pytest.mark.parametrize(
    ("model", "strategy"),
    core_of(
        rows(),
        lambda model, strategy: (
            model == "gpt_tied"
            or (model, strategy) in CORE_ROWS
            or (strategy == "mirrored-2" and model in ("mlp", "lstm", "unet"))
        ),
    ),
)
def test_training_equals_one_device(model: str, strategy: str) -> None:
    report = lockstep.verify(make_job(case(model)), STRATEGIES[strategy](), steps=5)
    assert report.passed, str(report)
    assert not report.undetermined


APART: dict[str, Callable[[], Strategy]] = {
    "every-2-on-2": lambda: lockstep.LocalSGDStrategy(2, ranks_on_devices(2), engine="gloo"),
    "epoch-on-3": lambda: lockstep.LocalSGDStrategy("epoch", ranks_on_devices(3), engine="gloo"),
    "diloco-on-2": lambda: lockstep.LocalSGDStrategy(
        2, ranks_on_devices(2), outer=lockstep.Nesterov(), average_optimizer=True, engine="gloo"
    ),
}


@pytest.mark.parametrize(
    ("model", "strategy"),
    core_of(
        [(model, strategy) for model in ("mlp", "cnn_dropout", "gpt_tied") for strategy in APART],
        [("gpt_tied", "every-2-on-2")],
    ),
)
def test_replicas_that_train_apart_equal_their_simulation(model: str, strategy: str) -> None:
    report = lockstep.verify(make_job(case(model)), APART[strategy](), steps=5)
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "name", core_of(["cnn_batch_norm", "cnn_dropout", "gpt_tied"], ["cnn_dropout"])
)
def test_the_bits_do_not_depend_on_the_number_of_ranks(name: str) -> None:
    """Nor on the run: deterministic kernels, and random draws of the device by share."""
    runs = [_trained(name, count) for count in (1, 1, 2, 4)]
    for other in runs[1:]:
        assert [key for key in runs[0] if not torch.equal(runs[0][key], other[key])] == []


def _trained(name: str, count: int) -> dict[str, torch.Tensor]:
    job = case(name)
    model = job.make_model()
    trainer = lockstep.Trainer(
        model,
        loss=job.loss,
        optimizer=job.optimizer,
        strategy=lockstep.MirroredStrategy(ranks_on_devices(count), num_shares=4, engine="gloo"),
        seed=3,
        deterministic=True,
    )
    trainer.fit((job.inputs, job.targets), batch_size=job.batch_size, epochs=2, verbose=0)
    return {key: value.cpu() for key, value in model.state_dict().items()}


FEW = ("mlp, clipped", "mlp, held", "embedding", "wide")


@pytest.mark.parametrize(
    ("count", "loops"), core_of([(1, LOOPS), (2, FEW), (3, LOOPS)], [(2, FEW)])
)
def test_a_loop_of_ones_own_equals_one_device(count: int, loops: Sequence[str]) -> None:
    words = [*STRICT, SCRIPT, f"gloo@{KIND}", *loops]
    assert_exact(run_as_torchrun(words, count), list(loops))


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("keras") is None, reason="no Keras here")
def test_a_loop_of_keras_equals_one_device() -> None:
    loops = ("mlp, Adam", "mlp, averaged", "words", "cnn")
    words = [*STRICT_BUT_KERAS, KERAS_SCRIPT, f"gloo@{KIND}", *loops]
    assert_exact(run_as_torchrun(words, 2, like="keras"), loops)
