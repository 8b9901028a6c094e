"""Measured costs of models, in the user's cache folder: a file for each model, batch and machine.

A file that cannot be read is measured and written anew.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import PlanError
from lockstep.graph.layer_graph import LayerGraph


def folder() -> Path:
    """``lockstep/profiles`` in the cache folder: ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    found = os.environ.get("XDG_CACHE_HOME")
    return (Path(found) if found else Path.home() / ".cache") / "lockstep" / "profiles"


def cached_graph(key: str, measure: Callable[[], LayerGraph]) -> LayerGraph:
    """The graph stored under this key, or else the measured one, which is stored."""
    path = folder() / f"{key}.json"
    try:
        return LayerGraph.load(path)
    except FileNotFoundError:
        pass  # not measured yet
    except (OSError, PlanError) as error:
        warnings.warn(f"{path} is measured anew: {error}", stacklevel=2)
    graph = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        graph.save(path)
    except OSError as error:
        warnings.warn(f"The measured costs cannot be remembered: {error}.", stacklevel=2)
    return graph
