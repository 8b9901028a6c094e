"""Plans, their tables and lowered programs, byte for byte as they were when last looked at.

A change that is meant is taken over with

    LOCKSTEP_WRITE_GOLDEN=1 .venv/bin/python -m pytest tests/golden

and shows in the diff of the files beside this one.
"""

import os
from functools import cache
from pathlib import Path

import msgspec
import pytest
from torch import Tensor

from lockstep.capture.graph import capture_graph, value_bytes
from lockstep.capture.layers import capture_layers
from lockstep.capture.tracing import trace_modes
from lockstep.cluster.topology import Cluster, Device, Host
from lockstep.data.trees import map_tensors
from lockstep.graph.layer_graph import LayerCosts, LayerGraph
from lockstep.plan.averaging import AveragedUpdate, Nesterov
from lockstep.plan.decision import ServedUpdate
from lockstep.plan.engines import over
from lockstep.plan.makers.data_parallel import LocalSteps, Maker, Mirrored, SingleDevice
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.makers.parameter_servers import Served
from lockstep.plan.makers.sharded import FullySharded
from lockstep.plan.pipeline.pipelines import Pipelined
from lockstep.plan.program.lowering import lower_forward, lower_train
from lockstep.plan.spec import Plan
from tests.programs import format_program
from tests.zoo import Case, case

HERE = Path(__file__).parent
WRITE = os.environ.get("LOCKSTEP_WRITE_GOLDEN") == "1"

CPUS = tuple(Device(kind="cpu", index=core, memory_bytes=1 << 30) for core in range(2))
CLUSTER = Cluster(hosts=(Host(name="golden", num_cores=2, devices=CPUS),))

MAKERS: dict[str, Maker] = {
    "single": SingleDevice(),
    "mirrored": Mirrored(devices=2, precision="fp64"),
    "mirrored-shares": Mirrored(devices=3, num_shares=5),
    "local": LocalSteps(
        maker=Mirrored(devices=2), update=AveragedUpdate(every=16, outer=Nesterov())
    ),
    "sharded": FullySharded(
        maker=over("gloo", Mirrored(devices=2)), level="parameters", units=None
    ),
    "sharded-replicas": FullySharded(
        maker=over("gloo", Mirrored(devices=4)), level="parameters", units=None, data=2, shard=2
    ),
    "servers": Served(workers=MirroredHosts(devices_per_host=3), update=ServedUpdate(servers=2)),
}
MODELS = ("mlp", "cnn_batch_norm", "gpt_tied")

PIPELINES: dict[str, Maker] = {
    "pipeline": Pipelined(stages=3),
    "pipeline-interleaved": Pipelined(stages=2, microbatches=4, schedule="interleaved"),
    "pipeline-zb-h1": Pipelined(stages=2, microbatches=3, schedule="zb-h1"),
    "hybrid": Pipelined(stages=2, microbatches=2, replicas=2, schedule="gpipe", recompute=(0,)),
    "local-pipelines": LocalSteps(
        maker=Pipelined(stages=2, microbatches=2, replicas=2), update=AveragedUpdate(every=16)
    ),
    "hybrid-uneven": Pipelined(microbatches=2, replicas=(3, 1)),
    "hybrid-tensor": Pipelined(stages=2, microbatches=2, replicas=2, tensor=2),
}
STAGED_MODELS = ("gpt_tied", "unet")

PLANS = [f"{model}.{maker}" for model in MODELS for maker in MAKERS]
PLANS += [f"{model}.{maker}" for model in STAGED_MODELS for maker in PIPELINES]


@cache
def make_plan(name: str) -> Plan:
    model, maker = name.split(".")
    job = case(model)
    if maker in MAKERS:
        return MAKERS[maker](capture_layers(job.make_model()), CLUSTER, job.batch_size)
    pipelined = PIPELINES[maker]
    size = pipelined.sample_size(CLUSTER, job.batch_size)
    assert size is not None
    return pipelined(capture_with_fixed_costs(job, size), CLUSTER, job.batch_size)


def single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def capture_with_fixed_costs(job: Case, size: int) -> LayerGraph:
    """For a microbatch of ``size``; with what was measured, no Plan would be the same twice."""
    model = job.make_model()
    sample = map_tensors(lambda tensor: single(tensor[:size]), job.inputs)
    trace = trace_modes(model, sample)[0]
    graph = capture_graph(model, trace, sample, value_bytes(trace, model, sample))
    layers = tuple(
        msgspec.structs.replace(
            layer,
            costs=LayerCosts(
                forward_seconds=(1 + number % 3) * 1e-3,
                backward_seconds=(2 + number % 5) * 1e-3,
                activation_bytes=1024 * (1 + number % 4),
            ),
        )
        for number, layer in enumerate(graph.layers)
    )
    return msgspec.structs.replace(graph, layers=layers)


def describe(plan: Plan, batch_size: int) -> str:
    """The table, and every rank's programs for a whole batch and for short ones."""
    lines = [str(plan)]
    for num_samples in sorted({batch_size, plan.num_ranks, 1}, reverse=True):
        lines.append(f"\nA batch of {num_samples}")
        for rank in range(plan.num_ranks):
            train = format_program(lower_train(plan, rank, num_samples))
            forward = format_program(lower_forward(plan, rank, num_samples))
            lines.append(f"rank {rank} trains:    {train}".rstrip())
            lines.append(f"rank {rank} evaluates: {forward}".rstrip())
    return "\n".join(lines) + "\n"


def assert_is_golden(found: bytes, file: Path) -> None:
    if WRITE:
        file.write_bytes(found)
    assert found.decode() == file.read_text()


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str, tmp_path: Path) -> None:
    make_plan(name).save(tmp_path / "plan.json")
    assert_is_golden((tmp_path / "plan.json").read_bytes(), HERE / f"{name}.json")


@pytest.mark.parametrize("name", PLANS)
def test_table_and_programs(name: str) -> None:
    text = describe(make_plan(name), case(name.split(".")[0]).batch_size)
    assert_is_golden(text.encode(), HERE / f"{name}.txt")


@pytest.mark.parametrize("name", PLANS)
def test_plans_of_old_files_can_be_read(name: str) -> None:
    assert Plan.load(HERE / f"{name}.json") == make_plan(name)


def test_no_file_is_left_over() -> None:
    expected = {f"{name}.{kind}" for name in PLANS for kind in ("json", "txt")}
    assert {path.name for path in HERE.iterdir() if path.suffix in (".json", ".txt")} == expected
