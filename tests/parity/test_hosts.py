"""The parity table over several hosts, in every way that launchers start them.

Hosts are network namespaces with addresses of their own. One start trains all models of its row,
since starting takes longer than training; every process of every host must come to the verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launchers import (
    BEGINNING,
    Launcher,
    by_lockstep_run,
    by_tf_config,
    by_torchrun,
    lines_of_all,
)
from tests.netns import Hosts
from tests.thorough import core_of
from tests.zoo import cases

MakeHosts = Callable[[int], Hosts]

SECONDS = 300.0

ALL = tuple(one.name for one in cases())
# Batch statistics, tied weights, gradients that some shares do not have, activations in place of
# gradients, a last batch that leaves replicas idle.
FEW = ("mlp", "cnn_batch_norm", "gpt_tied", "unused_branch", "wide")

# In Gbit/s: where gradients cross hosts, and where activations do instead.
FAST_NETWORK, SLOW_NETWORK = 10_000.0, 0.001


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Hosts, how the script is started there, and what it trains.

    Attributes:
        devices: of each host.
        start: the launcher.
        models: their names.
        slow_models: those that are trained once more as over a slow network.
        engine: what moves tensors.
        level: of sharding, or "replicas" of what is divided; None for whole replicas.
    """

    devices: tuple[int, ...]
    start: Launcher
    models: Sequence[str]
    slow_models: Sequence[str] = ()
    engine: str | None = None
    level: str | None = None


LAYOUTS = {
    "2 hosts x 1, TF_CONFIG": Layout(
        devices=(1, 1), start=by_tf_config, models=ALL, slow_models=FEW
    ),
    "2 hosts x 2, TF_CONFIG": Layout(
        devices=(2, 2),
        start=by_tf_config,
        models=("cnn_dropout", "lstm", "wide"),
        slow_models=("wide", "gpt_tied"),
    ),
    "3 hosts x 1, TF_CONFIG": Layout(
        devices=(1, 1, 1), start=by_tf_config, models=("mlp", "resnet"), slow_models=("wide",)
    ),
    "2 and 1 devices, lockstep run": Layout(
        devices=(2, 1),
        start=by_lockstep_run,
        models=("unused_branch", "two_inputs"),
        slow_models=("wide",),
    ),
    "2 hosts x 2, gloo": Layout(
        devices=(2, 2), start=by_tf_config, models=("gpt_tied", "unused_branch"), engine="gloo"
    ),
    "1 and 2 devices, gloo": Layout(
        devices=(1, 2), start=by_lockstep_run, models=("cnn_batch_norm",), engine="gloo"
    ),
    "2 and 1 devices, sharded": Layout(
        devices=(2, 1), start=by_lockstep_run, models=("gpt_tied", "mlp"), level="parameters"
    ),
    "2 hosts x 1, sharded gradients, TF_CONFIG": Layout(
        devices=(1, 1), start=by_tf_config, models=("cnn_batch_norm",), level="gradients"
    ),
    "2 hosts x 2, sharded, torchrun": Layout(
        devices=(2, 2), start=by_torchrun, models=("unused_branch",), level="parameters"
    ),
    "2 hosts x 2, sharded replicas, TF_CONFIG": Layout(
        devices=(2, 2), start=by_tf_config, models=("gpt_tied", "unused_branch"), level="replicas"
    ),
    "2 hosts x 2, torchrun": Layout(
        devices=(2, 2), start=by_torchrun, models=("cnn_batch_norm",), slow_models=("wide",)
    ),
}

CORE = ("2 hosts x 1, TF_CONFIG",)
MORE = ("2 and 1 devices, sharded", "2 hosts x 2, torchrun")

SCRIPT = f"""{BEGINNING}
from tests.kept_teams import keep_teams
from tests.zoo import case

def prove(name, gbit_per_second, engine, level):
    one = case(name)
    job = lockstep.Job(
        model=one.make_model(), loss=one.loss, optimizer=one.optimizer,
        data=(one.inputs, one.targets), batch_size=one.batch_size)
    strategy = lockstep.MultiWorkerMirroredStrategy(
        network_gbit_per_second=gbit_per_second, engine=engine, timeout_seconds=180)
    if level == "replicas":
        strategy = lockstep.HybridStrategy(2, shard=2, timeout_seconds=180)
    elif level:
        strategy = lockstep.FullyShardedStrategy(level=level, timeout_seconds=180)
    report = lockstep.verify(job, strategy, steps=5)
    tell({{
        "model": name, "network": gbit_per_second, "report": str(report),
        "passed": report.passed, "undetermined": report.undetermined,
        "replicas": strategy.num_replicas_in_sync}})

with keep_teams():
    for word in sys.argv[1:]:
        name, network, engine, level = word.split("@")
        prove(name, float(network), engine or None, level)
"""


@pytest.mark.parametrize("name", core_of(LAYOUTS, CORE, MORE))
def test_training_on_several_hosts_equals_one_device(
    name: str, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    hosts = make_hosts(len(layout.devices))
    path = tmp_path / "prove.py"
    path.write_text(SCRIPT)
    jobs = [
        *((model, FAST_NETWORK) for model in layout.models),
        *((model, SLOW_NETWORK) for model in layout.slow_models),
    ]
    how = f"{layout.engine or ''}@{layout.level or ''}"
    script = [str(path), *(f"{model}@{network}@{how}" for model, network in jobs)]
    started = [layout.start(hosts, host, script, layout.devices) for host in range(len(hosts))]
    for told, devices in zip(lines_of_all(started, SECONDS), layout.devices, strict=True):
        num_scripts = devices if layout.start is by_torchrun else 1
        for line in told:
            assert line["passed"], line["report"]
            mesh = f"{'shard' if layout.level else 'data'} {sum(layout.devices)}"
            mesh = "data 2 x shard 2" if layout.level == "replicas" else mesh
            assert mesh in line["report"]
            assert line["replicas"] == sum(layout.devices)
            assert not line["undetermined"]
        trained = [(line["model"], line["network"]) for line in told]
        assert sorted(trained) == sorted(jobs * num_scripts)


PLAN = f"""{BEGINNING}
from tests.zoo import case
from tests.thorough import core_of

one = case("wide")
for gbit_per_second in ({FAST_NETWORK}, {SLOW_NETWORK}):
    trainer = lockstep.Trainer(
        one.make_model(), loss=one.loss, optimizer=one.optimizer, precision="fp64",
        strategy=lockstep.MultiWorkerMirroredStrategy(
            network_gbit_per_second=gbit_per_second, timeout_seconds=180))
    trainer.fit((one.inputs, one.targets), batch_size=one.batch_size, verbose=0)
    tell([trainer.plan.hosts, [layer.row_limit for layer in trainer.plan.layers]])
"""


@pytest.mark.fresh
@pytest.mark.exhaustive
def test_the_speed_of_the_network_decides_what_crosses_it(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    path = tmp_path / "plan.py"
    path.write_text(PLAN)
    started = [by_tf_config(hosts, host, [str(path)], (1, 1)) for host in range(2)]
    for (split, fast), (_, slow) in lines_of_all(started, SECONDS):
        assert split == [1, 1]
        assert not any(fast)
        assert any(slow)
