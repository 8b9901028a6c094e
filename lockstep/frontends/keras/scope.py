"""The hook of ``strategy.scope()``: models made or compiled within get Lockstep's methods.

The hook is in place only while a scope is open, and acts only in the scope's own context. Models
get attributes that override the methods of their class; classes are restored afterwards.

Nothing here imports Keras, because a scope is for PyTorch models, too. If Keras is imported within
a scope, it is hooked then.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lockstep.data.batch_dims import BatchDims
from lockstep.errors import ModelError, OptionError
from lockstep.frontends.keras.bound_methods import METHODS
from lockstep.train.scope import current_dims, current_strategy, strategy_scope

_lock = threading.Lock()
_open_scopes = 0
_restore: list[Callable[[], None]] = []


@contextmanager
def scope_of(strategy: Any, dims: BatchDims) -> Iterator[Any]:
    """Within the block, Trainers and Keras models use a strategy.

    Raises:
        OptionError: Keras runs on another backend than PyTorch.
    """
    with _hooked(), strategy_scope(strategy, dims):
        yield strategy


@contextmanager
def _hooked() -> Iterator[None]:
    """Within the block, Keras models belong to the strategy of the scope.

    Raises:
        OptionError: Keras runs on another backend than PyTorch.
    """
    global _open_scopes
    if "keras" in sys.modules:
        check_backend()
        _make_where_keras_does()
    with _lock:
        _open_scopes += 1
        if _open_scopes == 1:
            _hook()
    try:
        yield
    finally:
        with _lock:
            _open_scopes -= 1
            while _open_scopes == 0 and _restore:
                _restore.pop()()


def check_backend() -> None:
    """Refuse other backends.

    Raises:
        OptionError: with the line that is missing.
    """
    backend = sys.modules["keras"].backend.backend()
    if backend != "torch":
        raise OptionError(
            "Keras models are trained on Keras's PyTorch backend, which is chosen when Keras "
            "is first imported (import tensorflow imports it, too).",
            received=f"the backend {backend!r}",
            fix="Import lockstep before keras; or put this line at the top of the script: "
            'import os; os.environ["KERAS_BACKEND"] = "torch"',
        )


def _make_where_keras_does() -> None:
    """Have new models made there, wherever one was trained before; ``fit`` moves them."""
    from lockstep.frontends.keras.settings import compute_on

    compute_on("cpu")


def _hook() -> None:
    """Put the hooks in place, now or as soon as Keras is imported."""
    if "keras" not in sys.modules:
        sys.meta_path.insert(0, _KerasFinder)
        _restore.append(partial(sys.meta_path.remove, _KerasFinder))
        return
    from keras.src.backend.torch.trainer import TorchTrainer
    from keras.src.trainers.trainer import Trainer

    for name in ("__init__", "compile"):
        _wrap(Trainer, name, _binding)
    for name in METHODS:
        _wrap(TorchTrainer, name, _refusing)


def _wrap(owner: type[Any], name: str, make: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    setattr(owner, name, make(original))
    _restore.append(partial(setattr, owner, name, original))


def _binding(original: Any) -> Any:
    """A method after which the model belongs to the scope's strategy."""

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if current_strategy() is not None:
            from lockstep.frontends.keras.methods import bind

            bind(self, current_strategy(), current_dims())
        return result

    return method


def _refusing(original: Any) -> Any:
    """A method that refuses models without a strategy, which would train on one device."""

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_strategy() is not None and "_lockstep" not in vars(self):
            raise ModelError(
                "A model must be made or compiled in the scope of the strategy that trains it.",
                received=f"{original.__name__} of {self.name!r}, which was neither",
                fix="Call compile within `with strategy.scope():`.",
            )
        return original(self, *args, **kwargs)

    return method


class _KerasFinder:
    """Hooks Keras as soon as it is imported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of Keras that other finders give, which hooks Keras after loading; else None."""
        if name != "keras":
            return None
        others = (one for one in sys.meta_path if one is not _KerasFinder)
        specs = (one.find_spec(name, path, target) for one in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_hook(module: ModuleType) -> None:
                load(module)
                check_backend()
                with _lock:
                    if _open_scopes:
                        _hook()

            vars(spec.loader)["exec_module"] = load_and_hook
        return spec
