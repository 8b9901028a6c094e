"""What is said where a device has no memory left, before there is a step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import accelerators
from lockstep.train.validation import checks


def test_no_memory_for_the_model_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(model: nn.Module, device: torch.device) -> None:
        raise torch.OutOfMemoryError

    plan: Any = SimpleNamespace(devices=("cuda:1",), sharding=None)
    monkeypatch.setattr(accelerators, "use", lambda _: None)
    monkeypatch.setattr(checks, "move_model", move)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        checks.place_model(nn.Linear(2, 2), [], plan)
    assert "cuda:1 ran out of memory" in " ".join(caught.value.__notes__)
