"""The wheel: it holds the package, and works beside nothing but what it declares to need.

The empty environment is a virtual environment without pip. What the wheel depends on is linked into
it from this one, distribution by distribution, and nothing else can be imported there.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pages import read_page

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    offline = ("--no-build-isolation", "--no-index", "--no-deps")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, ROOT)
    (built,) = folder.iterdir()
    return built


def run(*command: str | Path, folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    package = ROOT / "lockstep"
    files = {str(path.relative_to(ROOT)) for path in package.rglob("*") if path.is_file()}
    sources = {name for name in files if "__pycache__" not in name}
    assert "lockstep/py.typed" in sources
    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == sources


# Imports all modules; tells what the others miss, beside where the package is.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
missing = {}
for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
    try:
        importlib.import_module(module.name)
    except (ModuleNotFoundError, lockstep.LockstepError) as error:
        missing[module.name] = (error.__cause__ or error).name
print(json.dumps([lockstep.__file__, missing]))
"""


def test_the_ten_lines_of_readme_run_with_its_dependencies_alone(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "--no-index", "--no-deps", "--no-compile", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    link_dependencies(packages)

    assert run(environment / "bin" / "lockstep", "--version").startswith("lockstep ")
    ten_lines, its_check, *_ = read_page((ROOT / "README.md").read_text()).blocks[1:]
    assert "trainer.fit" in ten_lines.text
    assert its_check.kind == "hidden"
    script = tmp_path / "ten_lines.py"
    script.write_text(f"{ten_lines.text}\n{its_check.text}\n{IMPORT_ALL}")
    printed = run(python, script, folder=tmp_path)
    assert "Plan: mirrored, data 2, fp32" in printed
    file, missing = json.loads(printed.splitlines()[-1])
    assert Path(file).is_relative_to(packages)
    assert set(missing.values()) == {"keras"}, missing  # an extra


def link_dependencies(packages: Path) -> None:
    """Make those distributions importable that what is installed there needs, and no others."""
    (own,) = metadata.distributions(path=[str(packages)])
    for needed in closure(own):
        for entry in top_level_of(needed):
            link = packages / entry.name
            if not link.exists():
                link.symlink_to(entry)


def closure(distribution: metadata.Distribution) -> Iterator[metadata.Distribution]:
    """All that a distribution needs without its extras."""
    seen: set[str] = set()
    open_ones = [distribution]
    while open_ones:
        for text in open_ones.pop().requires or []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and name not in seen:
                seen.add(name)
                open_ones.append(metadata.distribution(name))
                yield open_ones[-1]


def top_level_of(distribution: metadata.Distribution) -> set[Path]:
    """Its files and folders in site-packages."""
    inside = [
        file for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")
    ]
    return {Path(str(distribution.locate_file(file.parts[0]))) for file in inside}
