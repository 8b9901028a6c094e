"""An accelerator for hosts without one: torch's device type "standin", of which there are two.

With this folder in ``PYTHONPATH`` torch loads it when it is imported, as it does other makers'
devices: it is an entry point of the group ``torch.backends``. So every process that inherits that
variable has it, and no other.
"""

import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import backend_registration

NAME = "standin"
NUM_DEVICES = 2

_SOURCE = Path(__file__).with_suffix(".cpp")
_TORCH = Path(torch.__file__).parent


def has_compiler() -> bool:
    """Whether it can be built here."""
    return shutil.which("g++") is not None


def library() -> Path:
    """The library of this source and torch, built if there is none yet."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir(), f"lockstep-standin-{getpass.getuser()}", f"{key}.so")
    if not built.exists():
        built.parent.mkdir(exist_ok=True, mode=0o700)
        _build(built)
    return built


def _build(library: Path) -> None:
    """Under a name of this process, then by one step under its own: others may build it, too."""
    own = library.with_suffix(f".{os.getpid()}")
    include = _TORCH / "include"
    folders = [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{_TORCH}/lib"]
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas"]
    command = ["g++", *options, str(_SOURCE), "-o", str(own), *folders, "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    own.rename(library)


def register() -> None:
    """What torch calls at the end of its import."""
    torch.ops.load_library(library())
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
    backend_registration.generate_methods_for_privateuse1_backend()


class _Module(ModuleType):
    """``torch.standin``: what torch and its users ask of any accelerator's module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._is_initialized = False

    def _lazy_init(self) -> None:
        self._is_initialized = True

    def is_initialized(self) -> bool:
        return self._is_initialized

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: Any) -> Any:
        return torch.accelerator.device_index(torch.device(device).index)

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(name="Stand-in", total_memory=1 << 30)

    def limit_memory(self, num_bytes: int) -> int:
        """Limit what each device holds for this process; returns the limit before."""
        return int(torch.ops.standin.limit_memory(num_bytes))

    def manual_seed(self, seed: int) -> None:
        self._generator().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(NUM_DEVICES):
            self._generator(index).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._generator(device).set_state(state)

    def _generator(self, device: Any = None) -> torch.Generator:
        index = device if device is None or type(device) is int else torch.device(device).index
        found: torch.Generator = torch.ops.standin.default_generator(-1 if index is None else index)
        return found
