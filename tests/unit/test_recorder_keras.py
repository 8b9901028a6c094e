"""``lockstep.record`` with models and optimizers of Keras."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import lockstep  # first: it chooses Keras's backend


@pytest.mark.thorough
def test_accumulated_gradients_are_one_update(tmp_path: Path) -> None:
    """As the optimizer makes it: of the mean of two batches, clipped."""

    def run(path: Path, batches: int, **options: Any) -> None:
        layers = [keras.layers.Input((4,)), keras.layers.Dense(3, name="own")]
        model = keras.Sequential(layers, name="net")
        model.set_weights([np.ones((4, 3)), np.zeros(3)])
        optimizer: Any = keras.optimizers.SGD(0.1, clipnorm=0.5, weight_decay=0.1, **options)
        x = torch.ones(4, 4) * torch.arange(4.0)[:, None]
        with lockstep.record(model, optimizer, path, steps=2):
            for part in [*x.split(4 // batches), *x.split(4 // batches)]:
                model.zero_grad()
                model(part).mean().backward()
                variables = model.trainable_variables
                optimizer.apply([each.value.grad for each in variables], variables)
        assert not {"apply", "_backend_update_step"} & vars(optimizer).keys()

    run(tmp_path / "whole", 1)
    run(tmp_path / "parts", 2, gradient_accumulation_steps=2)
    outcome = lockstep.compare(tmp_path / "parts", tmp_path / "whole")
    assert outcome.pairing.num_steps == 2
    assert {"gradient", "parameter"} <= {each.kind for each in outcome.pairing.differences}
    wrong = [each for each in outcome.pairing.differences if not each.agrees]
    assert not wrong
