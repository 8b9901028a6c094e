"""Processes of one host that torchrun has started: a call of theirs that fails is one of them all.

Each runs the script. Process 0 leads, and what it makes of a call the other one is told; where it
makes nothing of it, the other must not go on in that call.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.launchers import BEGINNING, by_standalone_torchrun

SECONDS = 120.0

SCRIPT = f"""{BEGINNING}
import gc
from functools import partial

me = "leader" if os.environ["LOCAL_RANK"] == "0" else "follower"

class AtEnd(lockstep.Callback):
    def on_train_end(self, logs=None):
        if sys.argv[1] == "late":
            raise ArithmeticError("a callback's own")

def stall(phase, info):
    if phase == "start" and info["generation"] == 2:
        gc.callbacks.remove(stall)
        time.sleep(5)

torch.manual_seed(0)
data = torch.randn(16, 4), torch.randn(16, 2)
trainer = lockstep.Trainer(
    nn.Linear(4, 2), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.01),
    callbacks=[AtEnd()], strategy=lockstep.MultiWorkerMirroredStrategy(timeout_seconds=60))

def fit():
    return sorted(trainer.fit(
        data, batch_size=0 if sys.argv[1] == "early" else 8, verbose=0).history)

def evaluate():
    return sorted(trainer.evaluate(data, batch_size=8))

def predict():
    return list(trainer.predict(data[0][:3], batch_size=8).shape)

def same():
    return trainer.same_everywhere(me)

# Before any training, too.
for call in (same, fit, evaluate, predict):
    try:
        said = call()
    except Exception as error:
        said = f"{{type(error).__name__}}: {{error}}"
    tell([me, call.__name__, said])
    if sys.argv[1] == "slow":
        if me == "leader":
            time.sleep(1)  # so long that the other one, which waits, tidies up
        elif call is fit:
            gc.callbacks.append(stall)
"""


def told(how: str, folder: Path) -> dict[str, dict[str, Any]]:
    """By process, what it has told of each call."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    found: dict[str, dict[str, Any]] = {"leader": {}, "follower": {}}
    for who, call, said in by_standalone_torchrun([str(script), how], SECONDS):
        found[who][call] = said
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "error"),
    [
        # Before the two have met.
        pytest.param("early", "OptionError: ", marks=pytest.mark.exhaustive),
        ("late", "ArithmeticError: a callback's own"),  # after all training
    ],
)
def test_a_call_that_fails_at_the_leader_ends_for_the_other(
    how: str, error: str, tmp_path: Path
) -> None:
    found = told(how, tmp_path)
    assert found["leader"].pop("fit").startswith(error)
    assert found["follower"].pop("fit").startswith(error)
    after = {"same": "leader", "evaluate": ["loss"], "predict": [3, 2]}
    assert found == {"leader": after, "follower": after}


@pytest.mark.exhaustive
def test_one_that_stalls_between_two_calls_is_waited_for(tmp_path: Path) -> None:
    found = told("slow", tmp_path)
    each = {"same": "leader", "fit": ["loss"], "evaluate": ["loss"], "predict": [3, 2]}
    assert found == {"leader": each, "follower": each}


STATE = f"""{BEGINNING}
from functools import partial

torch.manual_seed(0)
data = torch.randn(16, 4), torch.randn(16, 2)
trainer = lockstep.Trainer(
    nn.Linear(4, 2), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.01),
    strategy=lockstep.MultiWorkerMirroredStrategy(timeout_seconds=30))
states = [trainer.state_dict()]
trainer.fit(data, batch_size=8, verbose=0)
states.append(trainer.state_dict())
trainer.save("weights.safetensors")
while not os.path.exists("weights.safetensors"):
    time.sleep(0.02)  # the leader writes, and needs nobody else for it
trainer.load_state_dict(states[0])
told = trainer.same_everywhere(os.environ["LOCAL_RANK"])
tell([told, *(state["position"]["steps"] for state in states), trainer.fit(
    data, batch_size=8, verbose=0).history["loss"]])
"""


def test_calls_that_need_no_plan_need_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(STATE)
    leader, follower = by_standalone_torchrun([str(script)], SECONDS)
    assert leader[:3] == ["0", 0, 2]
    assert follower == leader


LONE_SAVE = f"""{BEGINNING}
torch.manual_seed(0)
trainer = lockstep.Trainer(
    nn.Linear(4, 2), loss=nn.MSELoss(), optimizer=torch.optim.Adam,
    strategy=lockstep.MultiWorkerMirroredStrategy(timeout_seconds=30))
trainer.fit((torch.randn(16, 4), torch.randn(16, 2)), batch_size=8, verbose=0)
if os.environ["LOCAL_RANK"] == "1":
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    sys.exit()
while not os.path.exists("pid") or not os.path.getsize("pid"):
    time.sleep(0.02)
with open("pid") as file:
    pid = file.read()
while os.path.exists(f"/proc/{{pid}}") and open(f"/proc/{{pid}}/stat").read().split()[2] != "Z":
    time.sleep(0.02)
trainer.save("weights.safetensors")
tell(os.path.getsize("weights.safetensors") > 0)
"""


@pytest.mark.exhaustive
def test_the_leader_saves_after_the_other_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(LONE_SAVE)
    assert by_standalone_torchrun([str(script)], SECONDS) == [True]
