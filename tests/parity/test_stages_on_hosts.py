"""Pipelines and hybrids whose stages, or replicas, are on different hosts.

Hosts are network namespaces with addresses of their own; each strategy is a row, and one start
trains all of its models.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launchers import BEGINNING, by_tf_config, lines_of_all
from tests.netns import Hosts
from tests.thorough import core_of

MakeHosts = Callable[[int], Hosts]

SECONDS = 300.0

# Name -> (ranks on each host, the strategy, models).
ROWS = {
    "a stage on each host": (
        (1, 1),
        "lockstep.PipelineStrategy(2, microbatches=3, timeout_seconds=180)",
        (
            "mlp",
            "gpt_tied",
            "unet",
            "two_tower",
            "encoder_decoder",
        ),
    ),
    "two stages on each host": (
        (2, 2),
        "lockstep.PipelineStrategy(4, microbatches=3, schedule='gpipe', timeout_seconds=180)",
        ("unet", "gpt_tied"),
    ),
    "three hosts, zero bubble": (
        (1, 1, 1),
        "lockstep.PipelineStrategy(3, microbatches=3, schedule='zb-h1', timeout_seconds=180)",
        ("gpt_tied", "resnet"),
    ),
    "stages in turn": (
        (1, 1),
        "lockstep.PipelineStrategy(2, microbatches=4, schedule='interleaved', timeout_seconds=180)",
        ("encoder_decoder", "gpt_tied"),
    ),
    "recomputation": (
        (1, 1),
        "lockstep.PipelineStrategy(2, microbatches=3, recompute=True, timeout_seconds=180)",
        ("cnn_dropout", "gpt_tied"),
    ),
    "a pipeline on each host": (
        (2, 2),
        "lockstep.HybridStrategy(2, 2, microbatches=2, timeout_seconds=180)",
        ("mlp", "gpt_tied", "unet", "cnn_dropout"),
    ),
    "a pipeline on each host, gloo": (
        (2, 2),
        "lockstep.HybridStrategy(2, 2, microbatches=2, engine='gloo', timeout_seconds=180)",
        ("mlp", "gpt_tied"),
    ),
    "a stage on each host, gloo": (
        (1, 1),
        "lockstep.PipelineStrategy(2, microbatches=3, engine='gloo', timeout_seconds=180)",
        ("unet", "lstm", "gpt_tied"),
    ),
    "replicas of a stage on both hosts, gloo": (
        (2, 2),
        "lockstep.HybridStrategy((3, 1), microbatches=2, engine='gloo', timeout_seconds=180)",
        ("gpt_tied",),
    ),
    "layers divided within each host": (
        (2, 2),
        "lockstep.HybridStrategy(2, tensor=2, timeout_seconds=180)",
        ("mlp", "gpt_tied", "cnn_batch_norm"),
    ),
    "layers divided within each host, gloo": (
        (2, 2),
        "lockstep.HybridStrategy(2, tensor=2, engine='gloo', timeout_seconds=180)",
        ("gpt_tied", "cnn_batch_norm"),
    ),
    "a stage on each host, its layers divided": (
        (2, 2),
        "lockstep.HybridStrategy(pipe=2, tensor=2, microbatches=3, timeout_seconds=180)",
        ("gpt_tied",),
    ),
    "replicas of a stage on both hosts": (
        (2, 2),
        "lockstep.HybridStrategy((3, 1), microbatches=2, timeout_seconds=180)",
        ("mlp", "gpt_tied"),
    ),
}

MORE = ("replicas of a stage on both hosts, gloo",)

SCRIPT = f"""{BEGINNING}
from tests.zoo import case

strategy = eval(sys.argv[1])
for name in sys.argv[2:]:
    one = case(name)
    job = lockstep.Job(
        model=one.make_model(), loss=one.loss, optimizer=one.optimizer,
        data=(one.inputs, one.targets), batch_size=one.batch_size)
    report = lockstep.verify(job, strategy, steps=4)
    tell({{"model": name, "report": str(report), "passed": report.passed,
           "undetermined": report.undetermined}})
"""


@pytest.mark.parametrize("name", core_of(ROWS, ["a stage on each host"], MORE))
def test_stages_on_several_hosts_equal_one_device(
    name: str, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    devices, strategy, models = ROWS[name]
    hosts = make_hosts(len(devices))
    path = tmp_path / "prove.py"
    path.write_text(SCRIPT)
    script = [str(path), strategy, *models]
    started = [by_tf_config(hosts, host, script, devices) for host in range(len(hosts))]
    for told in lines_of_all(started, SECONDS):
        for line in told:
            assert line["passed"], line["report"]
            assert not line["undetermined"]
        assert [line["model"] for line in told] == list(models)


AFTERWARDS = f"""{BEGINNING}
from functools import partial
from tests.zoo import case
from tests.thorough import core_of

one = case("gpt_tied")
torch.set_default_dtype(torch.float64)

def make(strategy):
    return lockstep.Trainer(
        one.make_model().double(), loss=one.loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), precision="fp64",
        schedule=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=40),
        strategy=strategy)

def train(trainer):
    fit = partial(trainer.fit, (one.inputs, one.targets), batch_size=one.batch_size, verbose=0)
    histories = [fit(epochs=2).history, fit(epochs=1).history]
    return histories, trainer.evaluate((one.inputs, one.targets), batch_size=one.batch_size)

ours = make(lockstep.PipelineStrategy(2, microbatches=3, timeout_seconds=180))
theirs = make(lockstep.SingleDeviceStrategy())
found, expected = train(ours), train(theirs)
torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
outputs = [trainer.predict(one.inputs, batch_size=7) for trainer in (ours, theirs)]
torch.testing.assert_close(*outputs, rtol=1e-11, atol=1e-12)
pairs = zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True)
for (name, mine), (_, other) in pairs:
    torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12, msg=name)
    slots = [
        trainer.optimizer.state[weight]["momentum_buffer"]
        for trainer, weight in ((ours, mine), (theirs, other))
    ]
    torch.testing.assert_close(*slots, rtol=1e-11, atol=1e-12, msg=name)
ours.save(sys.argv[1])
reloaded = make(lockstep.SingleDeviceStrategy())
reloaded.load(sys.argv[1])
for mine, other in zip(reloaded.model.parameters(), ours.model.parameters(), strict=True):
    assert torch.equal(mine, other)
tell(len(list(ours.model.parameters())))
"""


@pytest.mark.exhaustive
def test_every_host_has_the_whole_model_afterwards(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Weights, slots, histories, predictions; a schedule that moves at every step; a second fit; a
    checkpoint."""
    hosts = make_hosts(2)
    path = tmp_path / "afterwards.py"
    path.write_text(AFTERWARDS)
    script = [str(path), str(tmp_path / "model.safetensors")]
    started = [by_tf_config(hosts, host, script, (1, 1)) for host in range(2)]
    for (num_parameters,) in lines_of_all(started, SECONDS):
        assert num_parameters > 0
