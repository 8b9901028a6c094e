"""Notices code that sets the global random streams, even if it restores them afterwards.

``torch.random.fork_rng`` leaves no other trace. While another thread computes, such code changes
what that thread draws.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch

# Methods of torch's and Python's generators.
_SETTERS = ("manual_seed", "seed", "set_state", "setstate")
_SETTERS_OF_NUMPY = ("seed", "set_state")


@contextmanager
def noting_sets() -> Iterator[list[str]]:
    """Within the block calls of this thread that set a global random stream are noted, by name.

    A profiler (``sys.setprofile``) goes on.
    """
    noted: list[str] = []
    profiler = sys.getprofile()
    generators = (torch.default_generator, random.seed.__self__)  # type: ignore[attr-defined]

    def note(frame: FrameType, event: Any, function: Any) -> None:
        is_setter = event == "c_call" and function.__name__ in _SETTERS
        if is_setter and any(function.__self__ is generator for generator in generators):
            noted.append(function.__name__)
        if profiler is not None:
            profiler(frame, event, function)

    # Calls of compiled Cython are no events of a profiler.
    before = {name: getattr(np.random, name) for name in _SETTERS_OF_NUMPY}
    for name, function in before.items():
        setattr(np.random, name, _noted(function, name, noted))
    sys.setprofile(note)
    try:
        yield noted
    finally:
        sys.setprofile(profiler)
        for name, function in before.items():
            setattr(np.random, name, function)


def _noted(function: Callable[..., Any], name: str, noted: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        noted.append(name)
        return function(*args, **named)

    return call
