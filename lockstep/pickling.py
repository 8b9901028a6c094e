"""Pickles for processes that are started here: what they find goes by name, all else by value.

A function or class is pickled as the name of its module and its own, if the module is there
(cloudpickle). But that a script has a module does not say that a helper can import it: the file may
have been loaded by its path (``runpy.run_path``, importlib's ``spec_from_file_location``), or the
module be made by hand. Or a helper would import another file, which comes first on the search path.
What such modules hold is sent by value, as what ``__main__`` holds.

A function made within another goes by value, with the globals that it uses. Where its module
belongs to an installed package it gets that module's own there: a copy of a global that others set,
such as the context variable of a hook, would be set by nobody.

Not covered: finders that a script has added to ``sys.meta_path`` for itself. What they find goes by
name, since those of editable installs, which helpers have as well, look just like them.
"""

import io
import os
import pickle
import sys
import sysconfig
import threading
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

# cloudpickle's register of modules that go by value is one for the process.
_registering = threading.RLock()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Pickles for helpers; to be derived from.

    Args:
        file: to write to.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._by_value: list[ModuleType] = []
        self._known: set[object] = set()  # names of modules that were looked at
        self._search_path: tuple[str, ...] | None = None

    def dump(self, obj: Any) -> None:
        """Pickle an object."""
        with _registering:
            try:
                super().dump(obj)
            finally:
                while self._by_value:
                    cloudpickle.unregister_pickle_by_value(self._by_value.pop())

    def reducer_override(self, obj: Any) -> Any:
        """See ``pickle.Pickler``."""
        if isinstance(obj, type | FunctionType):
            self._look_at(obj.__module__)
        elif type(obj) is ModuleType:
            self._look_at(obj.__name__)
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and type(reduced) is tuple and is_installed(obj):
            _, (code, _, *options), (attributes, slots), *others = reduced
            made_of = (obj.__globals__["__name__"], code, *options)
            return _function_in, made_of, (attributes, {**slots, "__globals__": {}}), *others
        return reduced

    def _look_at(self, name: object) -> None:
        """Have what a module holds go by value, if helpers would not find it."""
        if name in self._known:
            return
        self._known.add(name)
        module = sys.modules.get(str(name))
        if not isinstance(module, ModuleType) or sys.modules.get(module.__name__) is not module:
            return  # it goes by value anyway, if by another name it cannot be found
        if self._search_path is None:
            self._search_path = tuple(search_path())
        is_registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if not is_registered and not is_found(module.__name__, self._search_path):
            cloudpickle.register_pickle_by_value(module)
            self._by_value.append(module)


def dumps(obj: Any) -> bytes:
    """An object, pickled for helpers."""
    file = io.BytesIO()
    Pickler(file).dump(obj)
    return file.getvalue()


def is_installed(function: FunctionType) -> bool:
    """Whether a function has the globals of a module of an installed package."""
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    file = getattr(module, "__file__", None)
    is_its_own = module is not None and vars(module) is function.__globals__
    return is_its_own and file is not None and file.startswith(_installed_places())


@lru_cache(maxsize=1)
def _installed_places() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[name] + os.sep for name in ("purelib", "platlib"))


def _function_in(module: str, code: CodeType, *options: Any) -> FunctionType:
    return FunctionType(code, vars(import_module(module)), *options)


# --- which modules a helper finds -----------------------------------------------------------------


def is_found(name: str, path: tuple[str, ...]) -> bool:
    """Whether a process with this search path finds a module of this one under its name.

    Args:
        name: in ``sys.modules``.
        path: see ``search_path``.
    """
    module = sys.modules.get(name)
    return module is not None and _is_found(name, getattr(module, "__file__", None), path)


@lru_cache(maxsize=4096)
def _is_found(name: str, file: str | None, path: tuple[str, ...]) -> bool:
    package, _, _ = name.rpartition(".")
    places: Any = path
    if package:
        if not is_found(package, path):
            return False
        places = getattr(sys.modules[package], "__path__", None)
        if places is None or file is None:
            return True  # what has made it here makes it there
    found = [PathFinder.find_spec(name, [*places])]
    if not _is_of(found[0], file):
        others = [each for each in sys.meta_path if each is not PathFinder]
        found += [each.find_spec(name, [*places] if package else None) for each in others]
    return any(_is_of(spec, file) for spec in found)


def _is_of(spec: ModuleSpec | None, file: str | None) -> bool:
    """Whether this loads a module from this file; None of a namespace, and of what is built in."""
    if spec is None:
        return False
    if file is None or not spec.has_location or spec.origin is None:
        return file is None and not spec.has_location
    try:
        return spec.origin == file or os.path.samefile(spec.origin, file)
    except OSError:  # it is gone
        return False


def search_path() -> list[str]:
    """``sys.path``, and where loaded modules came from that it no longer shows.

    A relative entry ('' under ``python -c``) means another directory after ``os.chdir``; what was
    imported through it must be found again. Such places come in its stead, before it.
    """
    # Looking at a thousand modules takes longer than many a call: only if there are others by now.
    known = frozenset(map(os.path.abspath, sys.path))
    return list(_search_path(tuple(sys.path), known, len(sys.modules)))


@lru_cache(maxsize=1)
def _search_path(entries: tuple[str, ...], known: frozenset[str], num_modules: int) -> list[str]:
    unknown = dict.fromkeys(root for root in _roots() if root not in known)
    lost = [root for root in unknown if not os.path.exists(os.path.join(root, "__init__.py"))]
    relative = [index for index, entry in enumerate(entries) if not os.path.isabs(entry)]
    at = relative[0] if relative else len(entries)
    return [*entries[:at], *lost, *entries[at:]]


def _roots() -> Iterator[str]:
    """Directories that hold the top-level modules and packages loaded by now."""
    for name, module in list(sys.modules.items()):
        if "." in name or name == "__main__" or not isinstance(module, ModuleType):
            continue
        spec = getattr(module, "__spec__", None)
        if spec is None or spec.name != name:
            continue  # some extension modules of packages show up by their short name, too
        for place in [*(spec.submodule_search_locations or [spec.origin])]:
            if not isinstance(place, str) or not os.path.isabs(place):
                continue  # built in or frozen
            root, base = os.path.split(place)
            if base.partition(".")[0] == name:
                yield root
