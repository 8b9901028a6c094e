"""``lockstep.record`` and ``compare`` on trainings of DDP, FSDP2, Accelerate, Lightning and others.

Every training runs in two processes and, as reference, in one; see ``recorded_loops`` and
``recorded_libraries``. Right ones must agree. With a planted fault the first difference must have
the right step, kind and tensor, and its cause the right name.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import lockstep
from tests import warm
from tests.launchers import ROOT
from tests.netns import HostProcess
from tests.parity import recorded_keras, recorded_libraries, recorded_loops, recorded_reports
from tests.thorough import core_of, wanted

PROGRAMS: dict[Path, dict[str, Any]] = {
    ROOT / "tests" / "parity" / "recorded_loops.py": recorded_loops.TRAININGS,
    ROOT / "tests" / "parity" / "recorded_libraries.py": recorded_libraries.TRAININGS,
    ROOT / "tests" / "parity" / "recorded_reports.py": recorded_reports.TRAININGS,
    ROOT / "tests" / "parity" / "recorded_keras.py": recorded_keras.TRAININGS,
}

# Their results are those of each replica, with which no layout agrees: they are faults.
NEVER_RIGHT = ("ddp, batch norm", "ddp, dropout", "keras, batch norm", "keras, dropout")
RIGHT = [name for own in PROGRAMS.values() for name in own if name not in NEVER_RIGHT]
UNNOTED = ("keras, fit",)  # neither samples nor loss
CORE_RIGHT = ("ddp", "ddp, uneven", "ddp, attention", "ddp, bf16", "fsdp2, adam", "plain, spare")

WEIGHT = "body.0.weight"
# Training and fault -> step, kind and tensor of the first difference, and its cause.
FAULTS = {
    # The wrapper's forward is not called: https://github.com/jingyaogong/minimind/issues/853
    "ddp:bypassed": (0, "gradient", WEIGHT, "not summed over ranks"),
    # A part of the model is outside: https://github.com/moojink/openvla-oft/issues/160
    "ddp:head outside": (0, "gradient", "head.weight", "not summed over ranks"),
    "ddp:no sampler": (0, "samples", "", "samples repeated"),
    "ddp:batch of each": (0, "samples", "", "batch size"),
    # https://github.com/Lightning-AI/pytorch-lightning/issues/13316
    "ddp:other order": (0, "samples", "", "other samples"),
    "ddp:last left out": (0, "samples", "", "samples left out"),
    "ddp:padded": (0, "samples", "", "samples repeated"),
    "ddp:other seed": (-1, "parameter", WEIGHT, "initial weights"),
    "ddp:skipped update": (1, "samples", "", "update left out"),
    "ddp:left over": (1, "gradient", WEIGHT, "gradients left over"),
    "ddp:sum": (0, "gradient", WEIGHT, "constant factor"),
    "ddp:rank changed": (1, "parameter", WEIGHT, "ranks differ"),
    # A mean of means of tokens: https://github.com/huggingface/transformers/issues/35203
    "ddp, uneven:mean of means": (0, "gradient", WEIGHT, "mean of means"),
    "ddp, accumulation:not divided": (0, "gradient", WEIGHT, "constant factor"),
    # https://github.com/huggingface/accelerate/issues/3533
    "ddp, accumulation:divided twice": (0, "gradient", WEIGHT, "constant factor"),
    "ddp, accumulation:never summed": (0, "gradient", WEIGHT, "not summed over ranks"),
    # https://github.com/huggingface/transformers/issues/31412
    "ddp, dropout:drawn alike": (0, "loss", "", "dropout drawn alike"),
    "ddp, dropout:drawn otherwise": (0, "loss", "", "dropout"),
    "ddp, batch norm:of replicas": (0, "loss", "", "batch statistics"),
    "ddp, clipping:not clipped": (0, "gradient", WEIGHT, "clipping"),
    # https://github.com/huggingface/accelerate/issues/2926
    "ddp, schedule:steps of all": (1, "option", f"{WEIGHT} lr", "learning rate"),
    "ddp, weight decay:groups of the wrapper": (
        *(0, "option", f"{WEIGHT} weight_decay"),
        "weight decay",
    ),
    "fsdp2:sums": (0, "gradient", WEIGHT, "constant factor"),
    # https://github.com/pytorch/torchtitan/issues/766
    "fsdp2, adam:clipped per rank": (0, "gradient", WEIGHT, "clipping per rank"),
    "fsdp2, accumulation:not divided": (0, "gradient", WEIGHT, "constant factor"),
    "plain:sums": (0, "gradient", WEIGHT, "constant factor"),
    "plain:own seed": (-1, "parameter", WEIGHT, "ranks differ"),
    "plain:one left out": (0, "gradient", "head.weight", "not summed over ranks"),
    "plain:head replaced": (0, "gradient", "head.weight", "never moved"),
    "plain, spare:none left out": (0, "gradient", "spare.weight", "not summed over ranks"),
    "accelerate:not prepared": (0, "gradient", "0.weight", "not summed over ranks"),
    "accelerate:loader not prepared": (0, "samples", "", "samples repeated"),
    "accelerate:batch of all": (0, "samples", "", "batch size"),
    # https://github.com/huggingface/accelerate/issues/3533
    "accelerate, accumulation:divided twice": (0, "gradient", "0.weight", "constant factor"),
    "fabric:bypassed": (0, "gradient", "0.weight", "not summed over ranks"),
    "fabric:loader not set up": (0, "samples", "", "samples repeated"),
    "fabric:sum": (0, "gradient", "0.weight", "constant factor"),
    "trainer:times ranks": (0, "gradient", "net.0.weight", "constant factor"),
    "trainer:clipped": (0, "gradient", "net.0.weight", "clipping"),
    "keras:not wrapped": (0, "gradient", "net/body/kernel", "not summed over ranks"),
    "keras:no sampler": (0, "samples", "", "samples repeated"),
    "keras:batch of each": (0, "samples", "", "batch size"),
    "keras:sum": (0, "gradient", "net/body/kernel", "constant factor"),
    "keras:clipped": (0, "gradient", "net/body/kernel", "clipping"),
    "keras:rate times ranks": (0, "option", "net/body/kernel lr", "learning rate"),
    "keras, batch norm:of replicas": (0, "loss", "", "batch statistics"),
    "keras, dropout:drawn alike": (0, "loss", "", "dropout drawn alike"),
    "keras, fit:each for itself": (0, "gradient", "net/body/kernel", "not summed over ranks"),
    # no_sync in the wrong passes of a window: https://github.com/modelscope/FunASR/pull/3472
    "accumulation:summed in the first pass": (0, "gradient", "0.weight", "not summed over ranks"),
    # An epoch's last window: https://github.com/huggingface/transformers/pull/39659
    "windows:divided by all": (3, "gradient", "0.weight", "constant factor"),
    # https://github.com/milesial/Pytorch-UNet/issues/468
    "scaler:clipped before unscaled": (0, "gradient", "0.weight", "clipping"),
    # https://github.com/pytorch/pytorch/issues/31771
    "epochs:no set_epoch": (2, "samples", "", "other samples"),
    # A model that takes over its average on one rank: https://github.com/lucidrains/ema-pytorch/issues/9
    "averages:on rank 0": (2, "loss", "", "ranks differ"),
    # https://github.com/pytorch/pytorch/issues/149205
    "sharded:optimizer behind a pass": (0, "option", "0.weight", "never moved"),
}
CORE_FAULTS = (
    *("ddp:bypassed", "ddp:no sampler", "ddp:left over", "ddp:rank changed", "plain:own seed"),
    *("ddp, uneven:mean of means", "ddp, accumulation:not divided", "ddp, dropout:drawn alike"),
    *("ddp, batch norm:of replicas", "ddp, weight decay:groups of the wrapper", "ddp:other seed"),
    *("fsdp2, adam:clipped per rank", "plain:head replaced", "ddp:skipped update"),
)


def start(program: Path, folder: Path, size: int, names: Sequence[str]) -> list[HostProcess]:
    """Start the processes that record trainings of a program."""
    own = {**os.environ, **warm.VARIABLES, "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(size)}
    argv = [sys.executable, str(program), str(folder), *names]
    like = "keras" if program.stem == "recorded_keras" else "torch"
    return [
        HostProcess(argv, {**own, "RANK": str(rank)}, folder, like=like) for rank in range(size)
    ]


def start_both(program: Path, folder: Path, names: Sequence[str]) -> list[HostProcess]:
    """Start two processes for the trainings, and one for their references."""
    references = list(dict.fromkeys(name.partition(":")[0] for name in names))
    return start(program, folder, 2, names) + start(program, folder, 1, references)


def record_all(
    programs: Mapping[Path, Mapping[str, Any]], wanted_names: Sequence[str], folder: Path
) -> None:
    """Record those trainings of programs that are wanted, in two processes and in one."""
    for program, trainings in programs.items():
        names = [each for each in wanted_names if each.partition(":")[0] in trainings]
        processes = start_both(program, folder, names) if names else []
        try:
            for each in processes:
                status, out, err = each.finish(200)
                assert status == 0, out + err[-3000:]
        finally:
            for each in processes:
                each.close()
            for store in folder.glob("store*"):
                store.unlink()


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records of all trainings that tests want."""
    folder = tmp_path_factory.mktemp("records")
    record_all(PROGRAMS, wanted(request, "name"), folder)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", core_of(RIGHT, CORE_RIGHT))
def test_a_right_run_agrees_with_one_process(name: str, records: Path) -> None:
    outcome = lockstep.compare(records / "of2" / name, records / "of1" / name)
    assert outcome.passed, outcome
    assert outcome.cause is None
    assert outcome.pairing.num_steps == 4
    assert not outcome.has_same_bits  # sums of two processes round otherwise
    noted = {"samples", "loss"} if name not in UNNOTED else set()
    kinds = {each.kind for each in outcome.pairing.differences}
    assert {*noted, "gradient", "parameter"} <= kinds


@pytest.mark.parametrize("name", core_of(RIGHT, CORE_RIGHT))
def test_the_ranks_of_a_right_run_agree_with_each_other(name: str, records: Path) -> None:
    outcome = lockstep.compare(records / "of2" / name)
    assert outcome.passed, outcome


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ddp:compiled", "fsdp2:compiled"])
def test_a_compiled_run_agrees_with_one_process_that_is_not(name: str, records: Path) -> None:
    outcome = lockstep.compare(records / "of2" / name, records / "of1" / name.partition(":")[0])
    assert outcome.passed, outcome
    assert outcome.pairing.num_steps == 4
    assert lockstep.compare(records / "of2" / name).passed


@pytest.mark.parametrize("name", core_of(FAULTS, CORE_FAULTS))
def test_a_planted_fault_is_named(name: str, records: Path) -> None:
    step, kind, tensor, cause = FAULTS[name]
    outcome = lockstep.compare(records / "of2" / name, records / "of1" / name.partition(":")[0])
    first = outcome.first
    assert first is not None
    assert outcome.cause is not None
    found = (first.step, first.kind, first.name, outcome.cause.kind)
    assert found == (step, kind, tensor, cause), outcome


# Faults that a record shows without a reference.
AMONG_RANKS = {
    "ddp:bypassed": "not summed over ranks",
    "ddp:no sampler": "samples repeated",
    "ddp:rank changed": "ranks differ",
    "ddp, dropout:drawn alike": "dropout drawn alike",
    "plain:own seed": "ranks differ",
    "plain:one left out": "not summed over ranks",
    "plain, spare:none left out": "not summed over ranks",
}


@pytest.mark.parametrize("name", core_of(AMONG_RANKS, ("ddp:bypassed", "ddp:rank changed")))
def test_ranks_that_differ_are_found_without_a_reference(name: str, records: Path) -> None:
    outcome = lockstep.compare(records / "of2" / name)
    assert outcome.cause is not None
    assert outcome.cause.kind == AMONG_RANKS[name], outcome


@pytest.mark.parametrize("name", ["ddp:bypassed"])
def test_a_fault_of_the_reference_is_told(name: str, records: Path) -> None:
    outcome = lockstep.compare(records / "of1" / "ddp", records / "of2" / name)
    assert outcome.cause is not None
    assert outcome.cause.kind == "reference", outcome
