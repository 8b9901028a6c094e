"""A fast import of Keras, for the fork server of a Keras model's helpers.

``import keras`` also imports JAX, scikit-learn, pandas, matplotlib and Orbax if they are installed:
for wrappers, plots, and data that only the script's process reads. That takes two thirds of its
time, and Keras works without them. So they are hidden during the import.
"""

import sys

_UNUSED = ("jax", "matplotlib", "orbax", "pandas", "sklearn", "tensorflow")


def _import_keras() -> None:
    hidden = [name for name in _UNUSED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # so importing it raises ImportError
    try:
        import lockstep.frontends.keras.trainer  # noqa: F401
    finally:
        for name in hidden:
            if sys.modules.get(name) is None:
                sys.modules.pop(name, None)


_import_keras()
