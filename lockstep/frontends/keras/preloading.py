"""What the template of a Keras model's helpers imports: Keras, and quickly.

``import keras`` also imports whatever is installed of JAX, scikit-learn, pandas, matplotlib and
Orbax: for wrappers, plots, and data that only the script's process reads. It does without them
where they are missing, and that is two thirds of its time. So here they are missing while it looks.

Of the rest two thirds are torch.compile's machinery, which Keras tells to keep off two functions.
Helpers compile nothing: it is imported when something else of it is asked for.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_UNUSED = ("jax", "matplotlib", "orbax", "pandas", "sklearn", "tensorflow")
_COMPILER = "torch._dynamo"


class _LateCompiler(ModuleType):
    def disable(self, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        return lambda function: function

    def __getattr__(self, name: str) -> Any:
        _remove(_COMPILER, self)
        return getattr(import_module(_COMPILER), name)


@contextmanager
def _standing_in(modules: dict[str, ModuleType | None]) -> Iterator[None]:
    """Within the block, these stand for modules that are not imported yet."""
    missing = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(missing)  # type: ignore[arg-type]  # for None an import raises ImportError
    try:
        yield
    finally:
        for name, module in missing.items():
            _remove(name, module)


def _remove(name: str, module: ModuleType | None) -> None:
    if sys.modules.get(name) is module:
        sys.modules.pop(name, None)


with _standing_in({**dict.fromkeys(_UNUSED), _COMPILER: _LateCompiler(_COMPILER)}):
    import lockstep.frontends.keras.trainer  # noqa: F401
