"""``lockstep.record`` with models and optimizers of Keras."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import lockstep  # first: it chooses Keras's backend
from lockstep.proof.recording.record_file import GRADIENT, PARAMETER
from lockstep.proof.records.run import Run


def fit(path: Path, *, rate: float = 0.1) -> Any:
    keras.utils.set_random_seed(0)
    body, head = keras.layers.Dense(8, "tanh", name="body"), keras.layers.Dense(3, name="head")
    model = keras.Sequential([keras.layers.Input((4,)), body, head], name="net")
    model.compile(optimizer=keras.optimizers.SGD(rate, momentum=0.9), loss="mse")
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    with lockstep.record(model, model.optimizer, path, steps=3):
        model.fit(x, x[:, :3], batch_size=10, shuffle=False, verbose=0)
    assert not {"apply", "_backend_update_step"} & vars(model.optimizer).keys()
    return model


@pytest.mark.thorough
def test_fit_is_recorded_by_keras_names(tmp_path: Path) -> None:
    fit(tmp_path / "one")
    run = Run(tmp_path / "one")
    assert run.num_steps == 3
    values = run.values(1)
    names = ["net/body/kernel", "net/body/bias", "net/head/kernel", "net/head/bias"]
    assert sorted(name for kind, name in values if kind == PARAMETER) == sorted(names)
    assert sorted(name for kind, name in values if kind == GRADIENT) == sorted(names)
    assert all(value.size > 0 for value in values.values())
    fit(tmp_path / "again")
    assert lockstep.compare(tmp_path / "again", tmp_path / "one").has_same_bits
    fit(tmp_path / "other", rate=0.2)
    outcome = lockstep.compare(tmp_path / "other", tmp_path / "one")
    assert outcome.cause is not None
    assert outcome.cause.kind == "learning rate"


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

    run(tmp_path / "whole", 1)
    run(tmp_path / "parts", 2, gradient_accumulation_steps=2)
    outcome = lockstep.compare(tmp_path / "parts", tmp_path / "whole")
    assert outcome.pairing.num_steps == 2
    assert {"gradient", "parameter"} <= {each.kind for each in outcome.pairing.differences}
    wrong = [each for each in outcome.pairing.differences if not each.agrees]
    assert not wrong
