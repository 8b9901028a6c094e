"""Helpers start from any kind of script, and are kept for later calls."""

from pathlib import Path

import pytest

from tests.faults.processes import JOB, run
from tests.launching import STRICT

CELLS = [
    "import torch, lockstep; from torch import nn; import numpy as np",
    "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.layer = nn.Linear(4, 1)\n"
    "    def forward(self, x):\n"
    "        return scale(self.layer(x))\n",
    "scale = lambda x: x * FACTOR\nFACTOR = 2.0",
    "class Rows(torch.utils.data.Dataset):\n"
    "    def __len__(self):\n        return 12\n"
    "    def __getitem__(self, i):\n"
    "        return np.full(4, i, 'f'), np.full(1, FACTOR, 'f')\n",
    "def loss(output, target):\n    return ((output - target) ** 2).mean()\n",
    "def trained(strategy):\n"
    "    torch.manual_seed(0)\n"
    "    trainer = lockstep.Trainer(Net(), loss=loss, strategy=strategy,\n"
    "        optimizer=lambda p: torch.optim.SGD(p, lr=0.001))\n"
    "    fit(trainer)\n"
    "    return trainer\n",
    "def fit(trainer):\n    trainer.fit(Rows(), epochs=2, batch_size=4, verbose=0)\n",
    "two = trained(lockstep.MirroredStrategy(devices=2))",
    "one = trained(lockstep.SingleDeviceStrategy())",
    "FACTOR = 3.0  # the next fit must see it in the helper as well",
    "fit(two); fit(one)",
    "print('alike', torch.allclose(two.model.layer.weight, one.model.layer.weight))",
]

NOTEBOOK = f"""
import code, sys
console = code.InteractiveConsole(sys.modules["__main__"].__dict__)
for cell in {CELLS!r}:
    assert not console.runsource(cell, "<cell>", "exec")
"""


@pytest.mark.exhaustive
def test_cells_of_a_notebook(tmp_path: Path) -> None:
    """Cells are compiled one by one, have no file, and define what is trained."""
    assert run(NOTEBOOK, directory=tmp_path, command=["-c", NOTEBOOK]) == "alike True\n"


MODULES = """
import beside
def in_forward(net):
    beside.note(f"{__name__} {sys.warnoptions}")
trainer = make_trainer()
os.chdir("../elsewhere")
train(trainer)
print("ranks", os.getpid(), *pids(trainer))
"""


@pytest.mark.thorough
def test_modules_beside_the_script_and_a_change_of_directory(tmp_path: Path) -> None:
    """Each rank takes its two steps, and what a helper prints is not lost with it."""
    home = make_home(tmp_path)
    *notes, last = run(JOB + MODULES, directory=home).splitlines()
    ranks = last.split()[1:]
    assert len(ranks) == 2
    # In steps, and before them, where the ranks' computations are compared and tried.
    assert {*notes} == {f"note {rank} __main__ {list(STRICT[1::2])}" for rank in ranks}
    assert all(notes.count(note) >= 2 for note in notes)


RELATIVE = """
import os
import beside
from lockstep.launch.workers.pool import take_team
os.chdir("../elsewhere")
team = take_team(1, None)
team.call(beside.work, b"", position=lambda rank: "here", timeout_seconds=60)
team.finish(60)
"""


def test_a_relative_search_path_and_a_change_of_directory(tmp_path: Path) -> None:
    """Under -c, sys.path has '', which no longer means the directory of what was imported."""
    home = make_home(tmp_path)
    out = run(RELATIVE, directory=home, command=["-c", RELATIVE])
    assert out == f"{tmp_path / 'elsewhere'}\n"


def make_home(directory: Path) -> Path:
    home, elsewhere = directory / "home", directory / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "beside.py").write_text(
        "import os\n"
        "def note(text):\n    print('note', os.getpid(), text)\n"
        "def work(*arguments):\n    print(os.getcwd())\n    return b''\n"
    )
    (elsewhere / "beside.py").write_text("raise ImportError('this is another module')\n")
    return home


TURNS = """
import threading
data = torch.ones(16, 8), torch.zeros(16, dtype=torch.long)
one, two = make_trainer(2), make_trainer(3)
found = []
def work():
    train(one)
    two.evaluate(data)
    one.predict(data[0])
    train(two)
    found.append((pids(one), pids(two)))
for _ in range(2):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    time.sleep(0.1)
work()
first, second = found[0]
print("kept", found == 3 * [(first, second)], len({*first, *second, os.getpid()}))
"""


@pytest.mark.exhaustive
def test_two_trainers_take_turns_in_threads_and_keep_their_helpers(tmp_path: Path) -> None:
    """Read from standard input. Helpers outlive the thread that asked for them."""
    out = run(JOB + TURNS, directory=tmp_path, command=["-"], stdin=JOB + TURNS)
    assert out == "kept True 4\n"


DAEMON = """
import os
for number in range(3):
    os.close(number)
import beside
from lockstep.launch.workers.pool import take_team
team = take_team(2, None)
team.call(beside.work, b"", position=lambda rank: "here", timeout_seconds=60)
team.finish(60)
open("report", "w").write("done")
"""


def test_closed_standard_streams(tmp_path: Path) -> None:
    """A daemon has none: descriptors 0 to 2 are then anything but."""
    home = make_home(tmp_path)
    run(DAEMON, directory=home, options=())
    assert (home / "report").read_text() == "done"
