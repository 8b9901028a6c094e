"""Tests on torch_tpu: on TPUs, or on its stand-in, which ``make test-tpu`` installs and starts."""

import pytest

import lockstep
from lockstep.errors import DeviceError
from tests.tpu.limits import LIMIT_SECONDS

try:
    # Before any test: torch.manual_seed would take all TPUs for this process.
    lockstep.initialize_tpu_system()
    REASON = ""
except DeviceError as error:
    REASON = f"`make test-tpu` runs it. {error}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where there is no TPU, and say so."""
    for item in items:
        if "tests/tpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))
            # torch_tpu's own code asks inner tensors for their gradients.
            item.add_marker(pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"))
            if REASON:
                item.add_marker(pytest.mark.skip(reason=REASON))
