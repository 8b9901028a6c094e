"""The examples of the documentation of losses and schedules run, in their order."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[2] / "docs" / "losses-and-schedules.md"


def test_examples_run() -> None:
    names: dict[str, Any] = {"__name__": "examples"}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        for example in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
            exec(example, names)
    assert names["outputs"].logits.shape == (64, 12, 50)
    counted = lockstep.OwnLoss.tokens().weight
    assert counted is not None
    inputs = {"labels": names["labels"]}
    assert int(names["loss"].weight(inputs)) == int(counted(inputs))
    for schedule in ("warm_restarts", "plateau"):
        trainer = lockstep.Trainer(
            torch.nn.Linear(8, 4),
            loss=torch.nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD,
            schedule=names[schedule],
        )
        data = names["x"], names["y"]
        history = trainer.fit(data, epochs=2, validation_data=data, verbose=0)
        assert len(history.history["lr"]) == 2
