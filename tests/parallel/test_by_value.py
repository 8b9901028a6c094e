"""What a helper would not find by its name is sent by value: files loaded by their path."""

import importlib
import pickle
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import lockstep
from lockstep import pickling
from tests.launching import TIMEOUT_SECONDS, clean_environment, write
from tests.zoo import Case

SOURCE = """
from dataclasses import dataclass
import torch
from torch import nn

SCALE = {scale}

@dataclass
class Out:
    values: torch.Tensor

class Mishap(ValueError):
    def __init__(self, place, sample):
        super().__init__(f"{{place}} of {{sample}}")

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return Out(scaled(self.layer(x)))

class Second(nn.Module):
    def forward(self, out):
        if out.values.isnan().any():
            raise Mishap("a value", "sample 3")
        return Out(out.values + 1.0)

def scaled(values):
    return SCALE * values

def loss(out, targets):
    return ((out.values - targets) ** 2).mean()
"""

X, Y = torch.randn(8, 4), torch.randn(8, 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With the file to load, and another one of that name which can be imported."""
    write(tmp_path / "elsewhere" / "plugin.py", SOURCE.format(scale=3.0))
    write(tmp_path / "found" / "plugin.py", SOURCE.format(scale=5.0))
    write(tmp_path / "elsewhere" / "pack" / "__init__.py", "")
    write(tmp_path / "elsewhere" / "pack" / "plugin.py", SOURCE.format(scale=3.0))
    monkeypatch.syspath_prepend(tmp_path / "found")
    yield tmp_path / "elsewhere"
    for name in ("plugin", "other", "other.plugin", "torch.plugin", "by_hand"):
        sys.modules.pop(name, None)


def loaded(name: str, path: Path, *, is_kept: bool = True, **options: Any) -> ModuleType:
    """As the documentation of importlib has it."""
    spec = spec_from_file_location(name, path, **options)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # which dataclasses need meanwhile
    spec.loader.exec_module(module)
    if not is_kept:
        del sys.modules[name]
    return module


def from_package(folder: Path) -> ModuleType:
    path = folder / "pack"
    loaded("other", path / "__init__.py", submodule_search_locations=[str(path)])
    return importlib.import_module("other.plugin")


def made_by_hand(folder: Path) -> ModuleType:
    module = ModuleType("by_hand")
    sys.modules["by_hand"] = module
    exec((folder / "plugin.py").read_text(), vars(module))
    return module


WAYS: dict[str, Callable[[Path], Any]] = {
    "under another name": lambda folder: loaded("other", folder / "plugin.py"),
    "under the name of another file": lambda folder: loaded("plugin", folder / "plugin.py"),
    "in no list of modules": lambda folder: loaded("plugin", folder / "plugin.py", is_kept=False),
    "under a package's name": lambda folder: loaded("torch.plugin", folder / "plugin.py"),
    "in a package that was loaded so": from_package,
    "made by hand": made_by_hand,
    "run": lambda folder: SimpleNamespace(**runpy.run_path(str(folder / "plugin.py"))),
    "run under a name": lambda folder: SimpleNamespace(
        **runpy.run_path(str(folder / "plugin.py"), run_name="plugin")
    ),
}


def make(plugin: Any, strategy: Any) -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        nn.Sequential(plugin.First(), plugin.Second()),
        loss=plugin.loss,
        optimizer=torch.optim.SGD,
        strategy=strategy,
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_was_loaded_by_its_path_is_sent(way: str, folder: Path) -> None:
    plugin = WAYS[way](folder)
    trainer = make(plugin, lockstep.MirroredStrategy(devices=2))
    trainer.fit((X, Y), batch_size=4, verbose=0)
    out = trainer.predict(X, batch_size=4)
    assert type(out) is plugin.Out
    torch.testing.assert_close(out.values, trainer.model(X).values)
    expected = make(plugin, None)
    expected.fit((X, Y), batch_size=4, verbose=0)
    for left, right in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(left, right)
    assert not cloudpickle.list_registry_pickle_by_value()


def test_between_stages_and_back_as_an_exception(folder: Path) -> None:
    plugin = loaded("plugin", folder / "plugin.py")
    trainer = make(plugin, lockstep.PipelineStrategy(2, cuts=["1"]))
    trainer.fit((X, Y), batch_size=4, verbose=0)
    out = trainer.predict(X, batch_size=4)
    assert type(out) is plugin.Out
    torch.testing.assert_close(out.values, trainer.model(X).values)
    with pytest.raises(plugin.Mishap, match="a value of sample 3"):
        trainer.predict(X.clone().fill_(torch.nan), batch_size=4)


SCRIPT = """
import torch, lockstep
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x) * SCALE

SCALE = 2.0
trainer = lockstep.Trainer(
    Net(), loss=nn.MSELoss(), optimizer=torch.optim.SGD,
    strategy=lockstep.MirroredStrategy(devices=2))
trainer.fit((torch.randn(8, 4), torch.randn(8, 3)), batch_size=4, verbose=0)
print("trained in", __name__)
"""


@pytest.mark.thorough
def test_a_script_that_another_one_runs_can_train(tmp_path: Path) -> None:
    write(tmp_path / "script.py", SCRIPT)
    code = "import runpy; runpy.run_path('script.py')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert (done.stdout, done.stderr) == ("trained in <run_path>\n", "")


def test_what_can_be_imported_goes_by_name() -> None:
    for thing in (Case, nn.Linear, torch.relu, Path, pytest, importlib.util, json_decoder()):
        assert len(pickling.dumps(thing)) < 200, thing
    assert not cloudpickle.list_registry_pickle_by_value()


def json_decoder() -> Any:
    return importlib.import_module("json").JSONDecoder


def test_a_function_made_in_an_installed_package_has_its_modules_globals() -> None:
    wrapped = torch.no_grad()(lambda: torch.is_grad_enabled())
    copy = pickle.loads(pickling.dumps(wrapped))
    assert copy is not wrapped
    assert copy.__globals__ is wrapped.__globals__
    assert copy() is False


def test_what_the_user_sends_by_value_stays_registered() -> None:
    module = sys.modules["tests.zoo"]
    cloudpickle.register_pickle_by_value(module)
    try:
        assert len(pickling.dumps(Case)) > 200
        assert cloudpickle.list_registry_pickle_by_value() == {"tests.zoo"}
    finally:
        cloudpickle.unregister_pickle_by_value(module)
