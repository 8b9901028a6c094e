"""TPUs, which come to torch with Google's torch_tpu: what can be known without importing either.

A process of torch_tpu has one chip, chosen by variables that libtpu reads when the process begins
to use it (``accelerators.rank_device``). Without libtpu torch_tpu ends the process at its import,
and torch imports torch_tpu by itself: so what is missing is looked for before torch is imported.
"""

import os
import re
from importlib import metadata
from importlib.util import find_spec

KIND = "tpu"

# libtpu's variables, for a process that is alone on one chip of its host.
_ONE_CHIP = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}

# With these torch_tpu's runtime expects the chips of all processes to form one slice.
LAUNCHERS_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")

_BOUND = re.compile(r"(>=|<=|==|<|>)\s*(\d+(?:\.\d+)*)")
_RELEASE = re.compile(r"\d+(?:\.\d+)*")


def chip_variables(chip: int) -> dict[str, str]:
    """The variables with which a process begins to use one of its host's chips."""
    return {"TPU_VISIBLE_CHIPS": str(chip), **_ONE_CHIP}


def is_installed() -> bool:
    """Whether torch has TPUs here, if the host has some."""
    return find_spec("torch_tpu") is not None


def missing_part() -> tuple[str, str] | None:
    """What keeps torch_tpu from working, and the remedy; None if it is complete."""
    if not is_installed():
        return "torch_tpu, which brings TPUs to torch, is not installed.", "pip install torch_tpu"
    if find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"):
        return "torch_tpu cannot be imported without libtpu.", "pip install libtpu"
    installed, needed = metadata.version("torch"), _needed_torch()
    if not _allows(needed, installed):
        return (
            f"torch {installed} and torch_tpu {metadata.version('torch_tpu')} do not match: it "
            f"needs torch{needed}.",
            f'pip install "torch{needed}"',
        )
    return None


def _needed_torch() -> str:
    """The versions of torch that torch_tpu needs, such as ``">=2.11.0,<=2.15.0"``."""
    for line in metadata.requires("torch_tpu") or ():
        if re.match(r"torch\b(?![-_.])", line):
            return ",".join("".join(bound) for bound in _BOUND.findall(line.partition(";")[0]))
    return ""


def _allows(bounds: str, version: str) -> bool:
    release = _RELEASE.match(version)
    if release is None:
        return True
    found = _numbers(release[0])
    return all(
        {
            ">=": found >= _numbers(bound),
            "<=": found <= _numbers(bound),
            "==": found == _numbers(bound),
            "<": found < _numbers(bound),
            ">": found > _numbers(bound),
        }[sign]
        for sign, bound in _BOUND.findall(bounds)
    )


def _numbers(version: str) -> tuple[int, int, int]:
    first, second, third, *_ = *map(int, version.split(".")), 0, 0
    return first, second, third
