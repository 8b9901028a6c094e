"""Tests on accelerators: on whatever ``torch.accelerator`` finds; ``make gpu`` runs these alone."""

import pytest
import torch

from tests.devices.found import REASON


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where there is none, and say so."""
    if REASON:
        for item in items:
            if "tests/devices/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """No TF32 in float32: what is compared here is compared by bits."""
    torch.set_float32_matmul_precision("highest")
