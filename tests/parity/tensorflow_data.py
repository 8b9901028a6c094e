"""Trains on a shuffled ``tf.data.Dataset`` under every strategy, and compares with a plain loop."""

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(Path(__file__).parents[2]))

import tensorflow as tf
import torch
from torch import nn

from tests.parity.test_streams import (
    STRATEGIES,
    Again,
    X,
    Y,
    assert_same,
    make_trainer,
    plain_loop,
)

EPOCHS = 2


def make_data() -> "tf.data.Dataset":
    """The same orders whenever it is made, another in every epoch."""
    data = tf.data.Dataset.from_tensor_slices((X.numpy(), Y.numpy()))
    return data.shuffle(len(Y), seed=3).batch(13).prefetch(1)


def main() -> None:
    """One line for each strategy."""
    torch.set_num_threads(1)
    data = make_data()
    batches = Again(lambda: ((inputs.numpy(), targets.numpy()) for inputs, targets in data))
    reference = plain_loop(batches, nn.CrossEntropyLoss(), EPOCHS)
    for name, strategy in STRATEGIES.items():
        trainer = make_trainer(strategy)
        trainer.fit(make_data(), epochs=EPOCHS, verbose=0)
        assert_same(trainer.model, reference)
        sys.stdout.write(f"{name} same\n")


main()
