"""What a script has set in torch is in force on every rank, however it was set."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.backends import cuda, cudnn, mkldnn

from lockstep import accelerators
from lockstep.errors import OptionError
from lockstep.parallel.settings import TorchSettings, check_deterministic, rounds_float32

_cudnn: Any = cudnn  # their types do not say what they have
_mkldnn: Any = mkldnn


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = TorchSettings.current()
    yield
    before._set()
    assert TorchSettings.current() == before


def _set_old_names() -> None:
    torch.set_float32_matmul_precision("medium")
    cudnn.allow_tf32 = False


# After most of these torch cannot say what its old names stand at.
PRECISIONS: dict[str, Callable[[], Any]] = {
    "old names": _set_old_names,
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "device": lambda: setattr(cudnn, "fp32_precision", "tf32"),
    "device products": lambda: setattr(cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(_cudnn.conv, "fp32_precision", "ieee"),
    "products on cores": lambda: setattr(_mkldnn.matmul, "fp32_precision", "bf16"),
}

KERNELS: dict[str, Callable[[], Any]] = {
    "cudnn": lambda: setattr(cudnn, "enabled", False),
    "attention": lambda: cuda.enable_cudnn_sdp(False),
    "order of attention": lambda: torch._C._set_sdp_priority_order([3, 2, 1, 0, 4]),
    "attention in 16 bits": lambda: cuda.allow_fp16_bf16_reduction_math_sdp(True),
    "sums of fp16": lambda: setattr(cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "sums of bf16": lambda: setattr(cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16": lambda: setattr(cuda.matmul, "allow_fp16_accumulation", True),
}


@pytest.mark.parametrize("change", [*PRECISIONS.values(), *KERNELS.values()])
def test_settings_travel(change: Callable[[], Any]) -> None:
    begun = TorchSettings.current()
    change()
    changed = pickle.loads(pickle.dumps(TorchSettings.current()))
    begun._set()  # another process
    assert changed != begun == TorchSettings.current()
    with changed.applied():
        assert TorchSettings.current() == changed
    assert TorchSettings.current() == begun


@pytest.mark.parametrize("kind", ["cpu", "mtia"])  # the latter may be asked for without a device
def test_autocast_travels_for_accelerators_too(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(accelerators, "kind", lambda: "mtia")
    with torch.autocast(kind, torch.bfloat16):
        settings = TorchSettings.current()
    assert dict(settings.autocast)[kind] == torch.bfloat16
    assert not torch.is_autocast_enabled(kind)
    with settings.applied():
        assert TorchSettings.current() == settings
    assert not torch.is_autocast_enabled(kind)


def test_nothing_is_said_where_the_kind_of_accelerator_has_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerators, "kind", lambda: "cuda")
    with TorchSettings.current().applied():
        assert not torch.cuda.is_initialized()


class _Product:
    """What torch does on a device that has computed before the variable was set."""

    def __init__(self, error: str) -> None:
        self._error = error

    def __matmul__(self, other: object) -> None:
        raise RuntimeError(self._error)


def test_a_device_that_cannot_be_deterministic_any_more_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("meta")  # as an accelerator that has done nothing yet
    check_deterministic(device)
    late = _Product("you must set an environment variable: CUBLAS_WORKSPACE_CONFIG=:4096:8")
    monkeypatch.setattr(torch, "ones", lambda *shape, device: late)
    check_deterministic(torch.device("cpu"))
    with pytest.raises(OptionError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8 in its environment"):
        check_deterministic(device)
    other = _Product("out of memory")
    monkeypatch.setattr(torch, "ones", lambda *shape, device: other)
    with pytest.raises(RuntimeError, match="out of memory"):
        check_deterministic(device)


def test_where_float32_is_taken_for_less() -> None:
    assert [rounds_float32(one) for one in ("cuda", "cpu")] == [True, False]  # in convolutions
    cudnn.allow_tf32 = False
    assert not rounds_float32("cuda")
    _mkldnn.matmul.fp32_precision = "bf16"
    assert [rounds_float32(one) for one in ("cuda", "cpu")] == [False, True]
