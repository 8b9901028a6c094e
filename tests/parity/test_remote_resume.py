"""A ``fit`` whose checkpoints are in a store goes on from there, to the same bits."""

from collections.abc import Iterator
from typing import Any, cast

import fsspec
import pytest
import torch

import lockstep.checkpoint
from lockstep.cli.main import main
from lockstep.errors import OptionError
from tests.parity.test_checkpoints import STEPS_PER_EPOCH, Ending, assert_same, fit, fit_until
from tests.parity.test_resume import make_trainer

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def url() -> Iterator[Any]:
    """Of a store that is in this process's memory."""
    yield cast(Any, URL)  # where others have a path
    fsspec.filesystem("memory").store.clear()


def test_a_training_goes_on_from_a_store(url: Any, capsys: Any, tmp_path: Any) -> None:
    whole = make_trainer("Adam", "mirrored-2")
    expected = fit(whole, None)
    fit_until(8, make_trainer("Adam", "mirrored-2"), url)
    second, counting = make_trainer("Adam", "mirrored-2", seed=1), Ending()
    second.callbacks = [counting]
    assert fit(second, url) == expected
    assert counting.num_steps == 3 * STEPS_PER_EPOCH - 6
    assert_same(whole, second)

    assert main(["checkpoint", "show", URL]) == 0
    assert "15" in capsys.readouterr().out.splitlines()[-1].split()
    assert main(["checkpoint", "verify", URL]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("whole")
    assert main(["checkpoint", "export", URL, str(tmp_path / "model.safetensors")]) == 0
    third = make_trainer("Adam", "single", seed=1)
    third.load(tmp_path / "model.safetensors")
    state = lockstep.checkpoint.load_state_dict(URL)
    for trainer in (second, third):
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(state[name], value), name


def test_a_record_is_not_kept_in_a_store() -> None:
    with pytest.raises(OptionError, match="`record` must be the path of a folder on this machine"):
        fit(make_trainer("Adam", "single"), None, record=URL)
