"""What the template of a Keras model's helpers imports: Keras, and quickly.

``import keras`` also imports whatever is installed of JAX, scikit-learn, pandas, matplotlib and
Orbax: for wrappers, plots, and data that only the script's process reads. It does without them
where they are missing, and that is two thirds of its time. So here they are missing while it looks.
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
