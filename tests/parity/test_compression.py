"""What hosts compress, held to a simulation in one process: step by step, in float64."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launchers import BEGINNING, by_tf_config, lines_of_all
from tests.netns import Hosts
from tests.thorough import core_of

MakeHosts = Callable[[int], Hosts]

SECONDS = 300.0

SYNCHRONOUS = "lockstep.MultiWorkerMirroredStrategy({}, timeout_seconds=180)"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Hosts, and what is proven on them.

    Attributes:
        devices: of each host.
        proofs: models, and strategies as a script writes them.
    """

    devices: tuple[int, ...]
    proofs: Sequence[tuple[str, str]]


def proofs(*models: str, compressions: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (model, SYNCHRONOUS.format(f"compression={one}"))
        for one in compressions
        for model in models
    ]


APART = "lockstep.LocalSGDStrategy({}, timeout_seconds=180)"


def apart(*models: str, options: Sequence[str]) -> list[tuple[str, str]]:
    return [(model, APART.format(one)) for one in options for model in models]


STAGED = "lockstep.HybridStrategy(2, 2, microbatches=2, {}, timeout_seconds=180)"


def staged(*models: str, compressions: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (model, STAGED.format(f"compression={one}")) for one in compressions for model in models
    ]


ALL = ["'bf16'", "'int8'", "lockstep.PowerSGD(2)", "lockstep.TopK(0.1)"]
WARM = "lockstep.PowerSGD(2, warm_up=2)"

LAYOUTS = {
    "2 hosts x 1": Layout(
        devices=(1, 1),
        proofs=[
            *proofs("mlp", compressions=[*ALL, WARM]),
            *apart("mlp", options=["2", "2, compression='int8'", f"2, compression={WARM}"]),
        ],
    ),
    "2 hosts x 1, others": Layout(
        devices=(1, 1),
        proofs=[
            *proofs("gpt_tied", "unused_branch", compressions=["lockstep.PowerSGD(2)", "'int8'"]),
            *apart("mlp", options=["2, outer=lockstep.Nesterov(), average_optimizer=True"]),
            *apart("mlp", options=[f"2, compression={one}" for one in ALL]),
        ],
    ),
    "2 hosts x 2": Layout(
        devices=(2, 2),
        proofs=[
            *proofs("cnn_dropout", compressions=ALL),
            *apart("gpt_tied", options=["3", "'epoch'", "2, compression='int8'"]),
            *staged("unused_branch", compressions=[*ALL, WARM]),
        ],
    ),
    "2 hosts x 2, a pipeline each": Layout(
        devices=(2, 2),
        proofs=[
            *apart("mlp", options=["2, stages=2, microbatches=2"]),
            *apart("gpt_tied", options=["3, stages=2, outer=lockstep.Nesterov()"]),
            *apart("mlp", options=["2, stages=2, compression='int8'"]),
        ],
    ),
    "1 and 2 devices": Layout(
        devices=(1, 2),
        proofs=[
            *proofs("wide", compressions=ALL),
            *apart("mlp", options=["2", "2, compression='bf16'"]),
        ],
    ),
    "3 hosts x 1": Layout(devices=(1, 1, 1), proofs=proofs("mlp", "lstm", compressions=ALL)),
}

SCRIPT = f"""{BEGINNING}
from tests.kept_teams import keep_teams
from tests.zoo import case

def prove(name, text):
    one = case(name)
    job = lockstep.Job(
        model=one.make_model(), loss=one.loss, optimizer=one.optimizer,
        data=(one.inputs, one.targets), batch_size=one.batch_size)
    report = lockstep.verify(job, eval(text), steps=6)
    tell({{"proof": [name, text], "report": str(report), "passed": report.passed}})

with keep_teams():
    for name, text in json.loads(sys.argv[1]):
        prove(name, text)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("name", core_of(LAYOUTS, ["2 hosts x 1"], []))
def test_what_is_compressed_equals_the_simulation(
    name: str, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    hosts = make_hosts(len(layout.devices))
    path = tmp_path / "prove.py"
    path.write_text(SCRIPT)
    script = [str(path), json.dumps(layout.proofs)]
    started = [by_tf_config(hosts, host, script, layout.devices) for host in range(len(hosts))]
    for told in lines_of_all(started, SECONDS):
        for line in told:
            assert line["passed"], (line["proof"], line["report"])
            assert "that simulates" in line["report"]
            assert re.search(r"result is (not|no longer) that of one device", line["report"])
        assert [tuple(line["proof"]) for line in told] == layout.proofs


# --- going on -------------------------------------------------------------------------------------

GOING_ON = f"""{BEGINNING}
import functools, hashlib
from tests.kept_teams import keep_teams
from tests.zoo import case

one = case("mlp")
data = one.inputs[:52].float(), one.targets[:52]  # as many steps for each replica

def make(text, *callbacks):
    return lockstep.Trainer(
        one.make_model().float(), loss=one.loss, strategy=eval(text), callbacks=callbacks,
        optimizer=functools.partial(torch.optim.Adam, lr=0.01))

def fit(trainer, epochs, **options):
    return trainer.fit(data, epochs=epochs, batch_size=one.batch_size, verbose=0, **options)

def bits(trainer):
    values = [one.detach().numpy().tobytes() for one in trainer.model.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()

class Stop(lockstep.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 6:
            raise ZeroDivisionError

with keep_teams():
    text, folder = sys.argv[1:]
    whole, halves, loaded, forgetful = make(text), make(text), make(text), make(text)
    fit(whole, 4)
    fit(halves, 2)
    state = halves.state_dict()
    fit(halves, 2)
    left = [state["residuals"][host] for host in "01"]
    sizes = [sum(float(part.abs().sum()) for part in each.values()) for each in left]
    loaded.load_state_dict(state)
    fit(loaded, 2)
    forgetful.load_state_dict({{**state, "residuals": {{}}}})
    fit(forgetful, 2)
    kept = lockstep.Checkpoint(folder, every="4 steps")
    stopped = make(text, Stop())
    try:
        fit(stopped, 4, checkpoint=kept)
    except Exception as error:
        failed = type(error).__name__
    stopped.close()
    kept_on = make(text)
    fit(kept_on, 4, checkpoint=kept)
    tell([sizes, failed, *map(bits, (whole, halves, loaded, forgetful, kept_on))])
"""

RESUMED = {
    "PowerSGD": SYNCHRONOUS.format("compression=lockstep.PowerSGD(2)"),
    "PowerSGD that has warmed up": SYNCHRONOUS.format(
        "compression=lockstep.PowerSGD(2, warm_up=1)"
    ),
    "int8": SYNCHRONOUS.format("compression='int8'"),
    "local SGD": APART.format("2, average_optimizer=True, compression='int8'"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", core_of(RESUMED, ["PowerSGD"], []))
def test_what_hosts_have_not_sent_is_a_part_of_a_training(
    name: str, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    path = tmp_path / "going_on.py"
    path.write_text(GOING_ON)
    script = [str(path), RESUMED[name], str(tmp_path / "checkpoints")]
    started = [by_tf_config(hosts, host, script, (1, 1)) for host in range(2)]
    told = [line for (line,) in lines_of_all(started, SECONDS)]
    assert told[0] == told[1]
    sizes, failed, whole, halves, loaded, forgetful, kept_on = told[0]
    assert min(sizes) > 0
    assert sizes[0] != sizes[1]
    assert failed == "ZeroDivisionError"
    assert whole == halves == loaded == kept_on
    assert forgetful != whole
