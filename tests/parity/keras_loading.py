"""Loads models that were written under strategies, in plain Keras on the backend in use."""

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np


def main(folder: Path) -> None:
    """One line for each model."""
    x = np.load(folder / "inputs.npz")["x"]
    for path in sorted(folder.glob("*.keras")):
        model = keras.models.load_model(path)
        wanted = np.load(path.with_suffix(".npz"))["y"]
        np.testing.assert_allclose(model.predict(x, verbose=0), wanted, rtol=1e-5, atol=1e-5)
        sys.stdout.write(f"{keras.backend.backend()} {path.stem} same\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
