"""What a script has set in torch is in force on every rank, however it was set."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.backends import cuda, cudnn, mkldnn

from lockstep.parallel.settings import TorchSettings


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
    "convolutions": lambda: setattr(cudnn.conv, "fp32_precision", "ieee"),
    "products on cores": lambda: setattr(mkldnn.matmul, "fp32_precision", "bf16"),
}


@pytest.mark.parametrize("change", PRECISIONS.values(), ids=PRECISIONS)
def test_precisions_travel(change: Callable[[], Any]) -> None:
    begun = TorchSettings.current()
    change()
    changed = TorchSettings.current()
    begun._set()  # another process
    assert changed != begun == TorchSettings.current()
    with changed.applied():
        assert TorchSettings.current() == changed
    assert TorchSettings.current() == begun
