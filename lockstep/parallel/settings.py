"""torch's process-wide settings that affect results: the same on every rank."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn

from lockstep import accelerators
from lockstep.errors import OptionError

_deterministic: Any = torch.utils.deterministic  # its type stubs lack attributes

# torch's settings of float32 precision, from the most general to the one that decides.
_FP32_PLACES = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
)

_Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attribute(module: Any, name: str) -> _Access:
    """Getter and setter of a setting that is an attribute."""
    return lambda: getattr(module, name), lambda value: setattr(module, name, value)


def _fp32_precision() -> tuple[Any, ...]:
    """The precision of float32, by torch's names before 2.9 and by its current ones.

    After some uses of the current names torch raises an error on reading the old ones: then None.
    """
    places = (torch._C._get_fp32_precision_getter(*place) for place in _FP32_PLACES)
    old = _or_none(torch.get_float32_matmul_precision), _or_none(lambda: cudnn.allow_tf32)
    return *old, *places


def _set_fp32_precision(values: tuple[Any, ...]) -> None:
    matmul, allow_tf32, *places = values
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
    if allow_tf32 is not None:
        cudnn.allow_tf32 = allow_tf32
    for place, value in zip(_FP32_PLACES, places, strict=True):  # last: the old names change these
        torch._C._set_fp32_precision_setter(*place, value)


def _reduced_sums(dtype: str) -> _Access:
    """Access to whether 16-bit products may be summed in 16 bits, and in parts."""
    name = f"allow_{dtype}_reduced_precision_reduction"

    def read() -> tuple[bool, bool]:
        return getattr(cuda.matmul, name), getattr(cuda.matmul, f"{name}_split_k", True)

    def write(value: tuple[bool, bool]) -> None:
        setattr(cuda.matmul, name, value[0] if value[1] else value)  # older versions take the first

    return read, write


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


# Settings of kernels and their precision: getter and setter of each.
_KERNELS: tuple[_Access, ...] = (
    (_fp32_precision, _set_fp32_precision),
    _attribute(mkldnn, "enabled"),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (
        lambda: tuple(torch._C._get_sdp_priority_order()),
        lambda value: torch._C._set_sdp_priority_order(list(value)),
    ),
    (cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp),
    _reduced_sums("fp16"),
    _reduced_sums("bf16"),
    _attribute(cuda.matmul, "allow_fp16_accumulation"),
    (cuda.preferred_blas_library, cuda.preferred_blas_library),
    (cuda.preferred_linalg_library, cuda.preferred_linalg_library),
    _attribute(cudnn, "enabled"),
    _attribute(cudnn, "deterministic"),
    _attribute(cudnn, "benchmark"),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (lambda: _flushes_denormals(), torch.set_flush_denormal),
    _attribute(_deterministic, "fill_uninitialized_memory"),
)

# cuBLAS needs it to be deterministic. torch reads it once, at a process's first product.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """Settings that a script may change before ``fit``.

    Attributes:
        default_dtype: of new floating tensors.
        deterministic: only deterministic algorithms may be used.
        warn_only: breaking that only warns.
        autocast: its dtypes, for the CPU and for this process's kind of accelerator; None where
            it is off.
        kernels: the permitted kernels and their precision.
    """

    default_dtype: torch.dtype
    deterministic: bool
    warn_only: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]
    kernels: tuple[Any, ...]

    @classmethod
    def current(cls) -> "TorchSettings":
        """The settings of this process and thread."""
        accelerator = accelerators.kind()
        types = ("cpu",) if accelerator is None else ("cpu", accelerator)
        return cls(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            autocast=tuple((name, autocast_dtype(name)) for name in types),
            kernels=tuple(read() for read, _ in _KERNELS),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In force within the block, in this process and thread."""
        before = TorchSettings.current()
        self._set()
        try:
            with ExitStack() as stack:
                for name, dtype in self.autocast:
                    if dtype != autocast_dtype(name):  # torch warns where there is no such device
                        stack.enter_context(torch.autocast(name, dtype, enabled=dtype is not None))
                yield
        finally:
            before._set()

    def _set(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        now = TorchSettings.current()
        # It imports torch.compile's modules, which takes longer than all else at a helper's start.
        if self.deterministic:
            os.environ.setdefault(*_WORKSPACE)
        if (now.deterministic, now.warn_only) != (self.deterministic, self.warn_only):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        for (_, write), value, own in zip(_KERNELS, self.kernels, now.kernels, strict=True):
            if value != own:
                write(value)


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Within the block torch uses only kernels that give the same bits in every run.

    torch raises an error with the name of an operation that has none. Filling new memory is turned
    off: it costs time and changes nothing if no memory is read before it is written.
    """
    before = TorchSettings.current()
    os.environ.setdefault(*_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    _deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        before._set()


def rounds_float32(device_type: str) -> bool:
    """True if kernels of a device may compute float32 in less: TF32, bfloat16."""
    backend = "cuda" if device_type == "cuda" else "mkldnn"
    values = (
        torch._C._get_fp32_precision_getter(*one) for one in _FP32_PLACES if one[0] == backend
    )
    return any(value in ("tf32", "bf16") for value in values)


def check_deterministic(device: torch.device) -> None:
    """Check that this process has not computed on a device before without determinism.

    Args:
        device: of this thread, within ``deterministic_kernels``.

    Raises:
        OptionError: it has.
    """
    if device.type == "cpu":
        return
    probe = torch.ones(2, 2, device=device)
    try:
        probe @ probe
    except RuntimeError as error:
        if _WORKSPACE[0] not in str(error):
            raise
        raise OptionError(
            "A process must choose deterministic kernels before it first uses its device.",
            received="deterministic=True after other work on the device",
            fix=f"Run the script with {'='.join(_WORKSPACE)} in its environment.",
        ) from error


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """This thread's autocast dtype for a kind of device; None where autocast is off."""
    # Some devices ("meta") have no autocast, and torch raises an error if asked for its state.
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def _flushes_denormals() -> bool:
    """True if subnormal numbers are flushed to 0; torch has only a setter for that."""
    return not torch.full((1,), 1e-40, dtype=torch.float32).mul_(0.5).item()


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Set the number of compute threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def modules_of_kernels() -> tuple[str, ...]:
    """The module that torch imports for deterministic kernels; preloaded, not in every helper."""
    return ("torch._inductor.config",) if torch.are_deterministic_algorithms_enabled() else ()
