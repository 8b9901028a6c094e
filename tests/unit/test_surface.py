"""The public surface: its names, and what importing it costs.

What is imported is asked of a fresh interpreter, as this one has imported everything.
"""

import ast
import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

PACKAGE = Path(lockstep.__file__).parent
PUBLIC = {
    "AutoStrategy",
    "BatchSizeSearch",
    "Callback",
    "Checkpoint",
    "CrossReplicaOptimizer",
    "EMA",
    "History",
    "FullyShardedStrategy",
    "HybridStrategy",
    "InputBoundWarning",
    "Job",
    "LocalSGDStrategy",
    "LockstepError",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "Nesterov",
    "OwnLoss",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "Plan",
    "PowerSGD",
    "Schedule",
    "SingleDeviceStrategy",
    "Strategy",
    "TPUClusterResolver",
    "TensorParallelStrategy",
    "TPUStrategy",
    "TopK",
    "Trainer",
    "all_mean",
    "callbacks",
    "checkpoint",
    "compare",
    "data",
    "device",
    "init",
    "initialize_tpu_system",
    "num_replicas",
    "rank",
    "record",
    "share",
    "verify",
}
HEAVY = ("torch", "rich", "torchmetrics", "sklearn", "tensorflow", "keras")
MOST_SECONDS = 0.1


def run(code: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return completed.stdout


def heavy_modules_after(code: str) -> list[str]:
    loaded = run(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    return [name for name in HEAVY if name in json.loads(loaded.splitlines()[-1])]


# --- names --------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert set(lockstep.__all__) == PUBLIC
    assert len(lockstep.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_loads_and_is_documented(name: str) -> None:
    value = getattr(lockstep, name)
    assert value is getattr(lockstep, name)
    assert value.__doc__


@pytest.mark.exhaustive
def test_every_public_name_is_what_it_is_in_whatever_order_names_are_loaded() -> None:
    """By a star import, which gives the public names only, and one by one from the last."""
    show = "print({name: type(value).__name__ for name, value in found.items()})"
    star = f"""
from lockstep import *
found = {{name: value for name, value in vars().copy().items() if not name.startswith("__")}}
{show}
"""
    reverse = f"""
import lockstep
found = {{name: getattr(lockstep, name) for name in sorted(lockstep.__all__, reverse=True)}}
{show}
"""
    forward, backward = (ast.literal_eval(run(code)) for code in (star, reverse))
    assert forward == backward
    assert forward.keys() == PUBLIC
    assert (forward["verify"], forward["data"]) == ("function", "module")


def test_dir_shows_what_is_public_and_nothing_else() -> None:
    """Before anything is loaded, and after: submodules and helpers of the package stay out."""
    before = ast.literal_eval(run("import lockstep; print(dir(lockstep))"))
    assert lockstep.Trainer.__module__ == "lockstep.train.trainer"
    assert hasattr(lockstep, "train")  # loading a name binds the packages on the way
    assert before == dir(lockstep) == sorted([*PUBLIC, "__version__", "keras"])


def test_loading_a_name_draws_no_random_number() -> None:
    """rich draws one when it is imported."""
    code = "import random, lockstep; random.seed(1); lockstep.Trainer; print(random.random())"
    assert float(run(code)) == random.Random(1).random()


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'trainer_'"):
        _ = lockstep.trainer_


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING, or names bound there, are the public names."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (guarded,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = set()
    for node in guarded.body:
        if isinstance(node, ast.ImportFrom):
            seen |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign):
            seen |= {ast.unparse(target) for target in node.targets}
    assert seen == PUBLIC


def test_no_module_bears_the_name_of_something_public_but_the_module_that_it_is() -> None:
    """Importing a submodule binds its name in the package, over what was exported under it."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    for name in modules & PUBLIC:
        assert getattr(lockstep, name) is importlib.import_module(f"lockstep.{name}")


# --- cost ---------------------------------------------------------------------------------------


def test_importing_lockstep_imports_nothing_heavy() -> None:
    assert heavy_modules_after("import lockstep") == []


def test_importing_lockstep_takes_no_time() -> None:
    code = (
        "import time\nbegan = time.process_time()\nimport lockstep\n"
        "print(time.process_time() - began)"
    )
    assert min(float(run(code)) for _ in range(5)) < MOST_SECONDS


PLANNING = [
    f"lockstep.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}"
    for floor in ("plan", "graph", "cluster")
    for path in sorted((PACKAGE / floor).rglob("*.py"))
    if path.stem not in ("__init__", "tables")  # tables render through rich
]


def test_planning_imports_neither_torch_nor_rich() -> None:
    assert "lockstep.plan.makers.data_parallel" in PLANNING
    assert heavy_modules_after(f"import {', '.join(PLANNING)}") == []


PLAN = """
import lockstep
from lockstep.cluster.devices import discover
from lockstep.graph.layer_graph import Layer, LayerGraph, ParameterInfo

weight = ParameterInfo(name="w", shape=(3, 4), dtype="float32", trainable=True)
graph = LayerGraph(layers=(Layer(name="0", kind="Linear", parameters=(weight,)),))
strategy = lockstep.MirroredStrategy(devices=2)
plan = strategy.maker()(graph, discover(), 32)
assert lockstep.Plan.from_json(plan.to_json()) == plan
"""


def test_a_plan_is_made_and_read_without_torch() -> None:
    assert heavy_modules_after(PLAN) == []
    assert heavy_modules_after(f"{PLAN}\nassert 'mirrored' in str(plan)") == ["rich"]
