"""Runs Python with ``cpu_tpu``: ``python tests/stand_ins/tpu/run.py -m pytest tests/tpu``.

It builds the shim between torch_tpu and XLA's plugin for CPUs, and sets the variables that
torch_tpu reads where there is no TPU.
"""

import getpass
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCE = HERE / "plugin_shim.c"


def shim() -> Path:
    """The library of this source, built if there is none yet."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    built = Path(tempfile.gettempdir(), f"lockstep-tpu-{getpass.getuser()}", f"{key}.so")
    if not built.exists():
        built.parent.mkdir(exist_ok=True, mode=0o700)
        own = built.with_suffix(f".{os.getpid()}")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(own), "-ldl"], check=True
        )
        own.rename(built)
    return built


def plugin() -> Path:
    """XLA's plugin for CPUs."""
    found = importlib.util.find_spec("lammps_jax_pjrt_cpu")
    if found is None or found.origin is None:
        sys.exit("The plugin is not installed: `make test-tpu` installs what these tests need.")
    return Path(found.origin).with_name("pjrt_c_api_cpu_plugin.so")


def variables() -> dict[str, str]:
    """The environment of processes that train on the stand-in."""
    path = (str(HERE), str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PJRT_CPU_PLUGIN": str(plugin()),
        "TPU_LIBRARY_PATH": str(shim()),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:8471",
        "TORCH_TPU_TOPOLOGY": "1,1,1",
    }


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], variables())
