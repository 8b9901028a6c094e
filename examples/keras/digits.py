"""Handwritten digits for the examples: images of 28 x 28 from 0 to 1, and classes.

MNIST, if its folder is the only argument of the example; else the 1,797 digits of scikit-learn,
enlarged from 8 x 8.
"""

import sys
from typing import Any

import numpy as np

NUM_TEST = 297


def load() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(images, classes) for training and for testing; images of shape (n, 28, 28)."""
    if len(sys.argv) > 1:
        from lockstep.data import load_mnist

        found = load_mnist(sys.argv[1])
        return tuple((images[:, 0], classes) for images, classes in (found.train, found.test))
    from sklearn.datasets import load_digits

    small, classes = load_digits(return_X_y=True)
    large = np.kron(small.reshape(-1, 8, 8) / 16, np.ones((3, 3)))
    images = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype("float32")
    return (images[NUM_TEST:], classes[NUM_TEST:]), (images[:NUM_TEST], classes[:NUM_TEST])
