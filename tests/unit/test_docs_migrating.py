"""The programs of two pages: each runs as typed, and all come to the same weights."""

import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests import warm
from tests.launchers import run_script
from tests.launching import STRICT_BUT_KERAS, clean_environment, free_port
from tests.netns import HostProcess
from tests.pages import Page, read_page
from tests.thorough import core_of

ROOT = Path(__file__).parents[2]
# By the page's name: how many programs it has, before and after.
COUNTS = {"migrating": 7, "own-loops": 4}
PAGES = {name: read_page((ROOT / "docs" / f"{name}.md").read_text()) for name in COUNTS}
STAND_INS = ROOT / "tests" / "stand_ins"
STOOD_IN_FOR = ("horovod",)
LAUNCHED = ("before_ddp.py", "after_ddp.py")
AS_ON_THE_OTHER_PAGE = ("migrating", "torchrun --standalone --nproc-per-node 2 after_ddp.py")
TIMEOUT_SECONDS = 240
# How torch 2.13 ends one in 25 processes of its own DistributedDataParallel over gloo.
TORCHS_ABORT = "terminate called without an active exception"
ABORTED_BY_TORCH = ("before_ddp.py",)

# They train in float32, and sum in their own orders: within 5e-7 of float64 when measured.
LARGEST_DIFFERENCE = 1e-5


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """The weights, by a loop in float64."""
    task: dict[str, Any] = {}
    with torch.random.fork_rng(devices=()):
        exec(PAGES["migrating"].files["task.py"], task)
        model = task["make_model"]().double()
    x, y = task["x"].double(), task["y"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        for inputs, targets in zip(x.split(100), y.split(100), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert (model(x).argmax(1) == y).double().mean() > 0.9, "there is something to learn"
    return [parameter.detach().float() for parameter in model.parameters()]


def starts_of(command: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The processes that do what is typed: arguments, and variables that a launcher sets.

    Torch's launcher starts the programs that use nothing but torch, and ours. Those of other
    libraries need its variables only.
    """
    words = shlex.split(command)
    strict = STRICT_BUT_KERAS if words[-1].startswith("after_") else ()  # others may warn
    plain = [sys.executable, *strict, words[-1]]
    if words[0] == "python":
        yield plain, {}
    elif words[-1] in LAUNCHED:
        yield [sys.executable, "-m", "torch.distributed.run", *words[1:]], {}
    else:
        assert words[0] in ("torchrun", "horovodrun"), command
        count = next(word for word in words if word.isdigit())
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        for rank in map(str, range(int(count))):
            yield plain, {**shared, **sizes, "RANK": rank, "LOCAL_RANK": rank}


def like(page: Page, argv: Sequence[str]) -> str | None:
    """The kind of warm interpreter that may run it: a launcher starts processes of its own."""
    text = page.files.get(argv[-1], "")
    # In a warm interpreter Keras has chosen its PyTorch backend.
    if "import tensorflow" in text:
        return None
    return "keras" if "import keras" in text else "torch"


def finish(processes: Sequence[HostProcess]) -> bool:
    """All of them must come to a good end; False if torch has aborted one."""
    for process in processes:
        status, out, err = process.finish(TIMEOUT_SECONDS)
        if status != 0 and TORCHS_ABORT in err:
            return False
        assert status == 0, out + err
    return True


def weights_in(folder: Path) -> list[Tensor]:
    """What a program has saved, in the order of the model's parameters."""
    (path,) = folder.glob("weights.*")
    if path.suffix == ".keras":
        import keras

        weights = keras.models.load_model(path).get_weights()
        return [torch.from_numpy(weight.T.copy()) for weight in weights]
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    return [state[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")]


def programs(page: Page) -> list[str]:
    return [name for name in page.files if name.startswith(("before_", "after_"))]


def is_core(name: str, command: str) -> bool:
    return "after_loop" in command or (name == "own-loops" and "after_horovod" in command)


def is_ours(name: str, command: str) -> bool:
    """Other programs have nothing of Lockstep; one page suffices to try the launcher of DDP."""
    return "before_" not in command and (name, command) != AS_ON_THE_OTHER_PAGE


@pytest.mark.parametrize(
    ("name", "command"),
    core_of(
        [
            (name, command)
            for name, page in PAGES.items()
            for command in page.commands
            if shlex.split(command)[-1] in programs(page)
        ],
        is_core,
        is_ours,
    ),
)
def test_a_program_comes_to_the_weights(
    name: str, command: str, expected: list[Tensor], tmp_path: Path
) -> None:
    page = PAGES[name]
    (block,) = (one for one in page.blocks if one.file == shlex.split(command)[-1])
    needs = [need for need in block.needs if need not in STOOD_IN_FOR]
    for need in needs:
        if importlib.util.find_spec(need) is None:
            pytest.skip(f"{need} is not installed")
    for file, text in page.files.items():
        (tmp_path / file).write_text(f"{text}\n")
    environment = clean_environment()
    environment.pop("KERAS_BACKEND", None)
    own = {
        "PYTHONPATH": str(STAND_INS),
        "HF_HUB_OFFLINE": "1",
        "KERAS_HOME": str(tmp_path),  # a file there may name another backend
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }

    def run() -> bool:
        with ExitStack() as stack:
            processes = []
            for argv, variables in starts_of(command):
                told = {**environment, **warm.VARIABLES, **own, **variables}
                process = HostProcess(argv, told, tmp_path, like=like(page, argv))
                stack.callback(process.close)
                stack.callback(process.end)
                processes.append(process)
            return finish(processes)

    assert run() or (block.file in ABORTED_BY_TORCH and (run() or run()))
    for found, wanted in zip(weights_in(tmp_path), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=LARGEST_DIFFERENCE)


def test_a_loop_of_ones_own_runs_as_one_replica(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PAGES["own-loops"].files["train.py"] + "\n")
    said = run_script([*STRICT_BUT_KERAS, "train.py"], tmp_path)
    assert [line.split(",")[0] for line in said.splitlines()] == ["epoch 0", "epoch 1"]


@pytest.mark.parametrize("name", PAGES)
def test_every_program_has_a_command_and_its_counterpart(name: str) -> None:
    page, own = PAGES[name], programs(PAGES[name])
    assert {shlex.split(command)[-1] for command in page.commands} == set(own)
    befores = {one.removeprefix("before_") for one in own if one.startswith("before_")}
    afters = {one.removeprefix("after_") for one in own if one.startswith("after_")}
    assert befores == afters
    assert len(befores) == COUNTS[name]
