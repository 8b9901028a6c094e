"""Pickles for helper processes: objects that helpers can import go by name, others by value.

cloudpickle pickles a function or class as the name of its module and its own, if the module is
loaded. But a module that the script has loaded need not be importable in a helper: its file may
have been loaded by path (``runpy.run_path``, importlib's ``spec_from_file_location``), or the
module was made by hand, or a helper would import another file, which is first on the search path.
The contents of such modules are sent by value, like those of ``__main__``.

A function made within another goes by value, with the globals that it uses. If its module belongs
to an installed package, it gets the globals of that module in the helper: a copy of a global that
other code sets, such as the context variable of a hook, would never be set.

Modules of any class go by name (``torch.ops``, lazy modules), also those that are only attributes
of others (``torch.ops.aten``). An object that cannot be pickled goes by name if it is an attribute
of a module that helpers find.

Not covered: finders that a script itself has added to ``sys.meta_path``. Modules from them go by
name, since they cannot be told from finders of editable installs, which helpers have, too.
"""

import copyreg
import functools
import io
import os
import pickle
import sys
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar, copy_context
from functools import lru_cache
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import CodeType, FunctionType, ModuleType
from typing import Any, NewType, ParamSpec, TypeVarTuple

import cloudpickle

# cloudpickle's register of modules that go by value is one for the process.
_registering = threading.RLock()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Pickles for helpers; a base class.

    Args:
        file: to write to.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._by_value: list[ModuleType] = []
        self._is_found: dict[str, bool] = {}  # by the names of modules that were looked at
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
        if isinstance(obj, CodeType):  # tracebacks of helpers show the script's own lines
            make, parts = cloudpickle.Pickler.dispatch_table[CodeType](obj)
            return make, tuple(obj.co_filename if one == "<dynamic-code>" else one for one in parts)
        if isinstance(obj, ModuleType) or id(obj) in _unusual_modules(len(sys.modules)):
            return self._reduce_module(obj)
        if not isinstance(obj, type | FunctionType):
            return self._reduce_object(obj)
        self.finds(obj.__module__)
        reduced = super().reducer_override(obj)
        if type(reduced) is not tuple or len(reduced) < 3:
            return reduced  # by name
        make, made_of, (attributes, slots), *others = reduced
        if isinstance(obj, type):
            attributes = {**attributes, "__qualname__": obj.__qualname__}
        elif is_installed(obj):
            make, made_of = _function_in, (obj.__globals__["__name__"], *made_of[:1], *made_of[2:])
            slots = {**slots, "__globals__": {}}
        return make, made_of, (attributes, slots), *others

    def finds(self, name: object) -> bool:
        """True if helpers find a module by its name; else its contents go by value."""
        key = str(name)
        if key not in self._is_found:
            self._is_found[key] = self._look_for(key)
        return self._is_found[key]

    def _look_for(self, name: str) -> bool:
        module = sys.modules.get(name)
        if module is None or name == "__main__":
            return False
        if name in cloudpickle.list_registry_pickle_by_value():
            return False
        if self._search_path is None:
            self._search_path = tuple(search_path())
        found = is_found(name, self._search_path)
        # cloudpickle does not find a module under another name than its own, either.
        if not found and isinstance(module, ModuleType) and module.__name__ == name:
            cloudpickle.register_pickle_by_value(module)
            self._by_value.append(module)
        return found

    def _reduce_module(self, module: Any) -> Any:
        name, path = _place_of_module(module)
        place = (name, path) if self.finds(name) else self.place_of(module)
        if place is not None:
            return attribute_of, place
        if not isinstance(module, ModuleType):
            return self._reduce_object(module)
        if isinstance(getattr(module.__spec__, "loader", None), ExtensionFileLoader):
            return _load_extension, (module.__name__, module.__file__)
        state = {name: value for name, value in vars(module).items() if name != "__builtins__"}
        return _new_module, (type(module), module.__name__), state, None, None, _set_state

    def _reduce_object(self, obj: Any) -> Any:
        reduce = self.dispatch_table.get(type(obj))
        try:
            reduced = obj.__reduce_ex__(self.proto) if reduce is None else reduce(obj)
        except Exception:
            place = self.place_of(obj)
            if place is not None:
                return attribute_of, place
            if type(obj) is not ContextVar:
                raise
            return _new_context_variable, _value_of(obj)
        if isinstance(reduced, str):
            return self._reduce_global(obj, reduced)
        if reduced[0] is copyreg.__newobj__ and _would_ask_itself(obj):  # type: ignore[attr-defined]
            return *reduced, *[None] * (5 - len(reduced)), _set_state
        return reduced

    def place_of(self, obj: Any) -> tuple[str, tuple[str, ...]] | None:
        """A module that helpers find, and the attribute there that is this object."""
        if hasattr(type(obj), "__next__"):
            return None  # an open file, a generator: the helper's may be at another position
        for name, module in list(sys.modules.items()):
            for holder in (module, type(module)):
                for attribute, value in [*getattr(holder, "__dict__", {}).items()]:
                    if value is obj and self.finds(name):
                        return name, (attribute,)
        return None

    def _reduce_global(self, obj: Any, name: str) -> Any:
        """Reduce an object that pickle would send by name."""
        module = getattr(obj, "__module__", None)
        if module is None or self.finds(module):
            return name
        by_value = _GLOBALS.get(type(obj))
        if by_value is not None:
            return by_value(obj)
        owner = getattr(obj, "__self__", None)  # of functions of an extension module
        return (getattr, (owner, name)) if isinstance(owner, ModuleType) else name


def dumps(obj: Any) -> bytes:
    """An object, pickled for helpers."""
    file = io.BytesIO()
    Pickler(file).dump(obj)
    return file.getvalue()


def is_installed(function: FunctionType) -> bool:
    """True if a function has the globals of a module of an installed package."""
    name = str(function.__globals__.get("__name__"))
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    is_its_own = module is not None and vars(module) is function.__globals__
    return is_its_own and file is not None and _has_packages(_root_of(name, file))


def _root_of(name: str, file: str) -> str:
    """The folder of the search path that a module was found in."""
    is_package = os.path.basename(file).partition(".")[0] == "__init__"
    for _ in range(name.count(".") + 1 + is_package):
        file = os.path.dirname(file)
    return file


@lru_cache(maxsize=256)
def _has_packages(folder: str) -> bool:
    """True if a folder has packages installed by pip or a similar tool."""
    if os.path.basename(folder) in ("site-packages", "dist-packages"):
        return True
    return os.path.isdir(folder) and any(name.endswith(".dist-info") for name in os.listdir(folder))


# --- types that pickle and cloudpickle do not support, or reduce differently ----------------------


def _weak_reference(reference: Any) -> Any:
    target = reference()
    if target is None:
        return _dead_reference, ()
    callback = reference.__callback__
    return weakref.ref, (target,) if callback is None else (target, callback)


def _dead_reference() -> Any:
    return weakref.ref(Context())


def _weak_method(method: Any) -> Any:
    target = method()
    return (_dead_reference, ()) if target is None else (weakref.WeakMethod, (target,))


def _weak_dict(mapping: Any) -> Any:
    return type(mapping), (), None, None, iter(list(mapping.items()))


def _cached_property(descriptor: Any) -> Any:
    state = {name: value for name, value in vars(descriptor).items() if name != "lock"}
    return functools.cached_property, (descriptor.func,), state


_TABLE = {
    functools.cached_property: _cached_property,
    weakref.ref: _weak_reference,
    weakref.WeakMethod: _weak_method,
    weakref.WeakKeyDictionary: _weak_dict,
    weakref.WeakValueDictionary: _weak_dict,
}
Pickler.dispatch_table = ChainMap(_TABLE, cloudpickle.Pickler.dispatch_table)


def _cached(function: Any) -> Any:
    parameters = function.cache_parameters()
    made_of = function.__wrapped__, parameters["maxsize"], parameters["typed"]
    return _cache_anew, made_of


def _cache_anew(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return lru_cache(maxsize, typed)(function)


# Types that pickle would send by name only.
_GLOBALS: dict[Any, Callable[[Any], Any]] = {
    functools._lru_cache_wrapper: _cached,
    NewType: lambda kind: (NewType, (kind.__name__, kind.__supertype__)),
    ParamSpec: lambda kind: (ParamSpec, (kind.__name__,)),
    TypeVarTuple: lambda kind: (TypeVarTuple, (kind.__name__,)),
}


def _value_of(variable: "ContextVar[Any]") -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    """A context variable's name, its default and its value, each if it has one."""
    default, value = (_get_in(context, variable) for context in (Context(), copy_context()))
    return variable.name, default, value


def _get_in(context: Context, variable: "ContextVar[Any]") -> tuple[Any, ...]:
    try:
        return (context.run(variable.get),)
    except LookupError:
        return ()


def _new_context_variable(
    name: str, default: tuple[Any, ...], value: tuple[Any, ...]
) -> "ContextVar[Any]":
    variable: ContextVar[Any] = (
        ContextVar(name, default=default[0]) if default else ContextVar(name)
    )
    if value != default:
        variable.set(value[0])
    return variable


def _would_ask_itself(obj: Any) -> bool:
    """True if unpickling would look up ``__setstate__`` by the class's own ``__getattr__``."""
    return hasattr(type(obj), "__getattr__") and not hasattr(type(obj), "__setstate__")


def _set_state(obj: Any, state: Any) -> None:
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    vars(obj).update(attributes or {})
    for name, value in (slots or {}).items():
        object.__setattr__(obj, name, value)


def attribute_of(module: str, path: tuple[str, ...]) -> Any:
    """An attribute of a module, by a path of names."""
    return functools.reduce(getattr, path, import_module(module))


def _new_module(kind: type[ModuleType], name: str) -> ModuleType:
    module = kind.__new__(kind)
    ModuleType.__init__(module, name)
    return module


def _load_extension(name: str, file: str) -> ModuleType:
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _function_in(module: str, code: CodeType, *options: Any) -> FunctionType:
    return FunctionType(code, vars(import_module(module)), *options)


# --- modules that a helper finds ------------------------------------------------------------------


@lru_cache(maxsize=1)
def _unusual_modules(num_modules: int) -> frozenset[int]:
    """The ids of objects in ``sys.modules`` that are not of a module type."""
    modules = list(sys.modules.values())
    return frozenset(
        id(one) for one in modules if one is not None and not isinstance(one, ModuleType)
    )


def _place_of_module(module: Any) -> tuple[str, tuple[str, ...]]:
    """A name in ``sys.modules``, and a path of attributes from there; ("", ()) if there is none."""
    parts = str(getattr(module, "__name__", "")).split(".")
    for count in range(len(parts), 0, -1):
        name, path = ".".join(parts[:count]), tuple(parts[count:])
        root = sys.modules.get(name)
        if root is not None and _descend(root, path) is module:
            return name, path
    return next((name for name, one in [*sys.modules.items()] if one is module), ""), ()


def _descend(root: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda one, name: getattr(one, name, None), path, root)


def is_found(name: str, path: tuple[str, ...]) -> bool:
    """True if a process with this search path finds the same module by its name.

    Args:
        name: in ``sys.modules``.
        path: see ``search_path``.
    """
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    # ``torch.ops`` has the name of a file and not its path: it is not loaded from one.
    is_path = isinstance(file, str) and os.path.isabs(file)
    return module is not None and _is_found(name, file if is_path else None, path)


@lru_cache(maxsize=4096)
def _is_found(name: str, file: str | None, path: tuple[str, ...]) -> bool:
    package, _, _ = name.rpartition(".")
    places: Any = path
    if package:
        if not is_found(package, path):
            return False
        places = getattr(sys.modules[package], "__path__", None)
        if places is None or file is None:
            return True  # its package makes it there, too
    found = [PathFinder.find_spec(name, [*places])]
    if not _is_of(found[0], file):
        others = [each for each in sys.meta_path if each is not PathFinder]
        found += [each.find_spec(name, [*places] if package else None) for each in others]
    return any(_is_of(spec, file) for spec in found)


def _is_of(spec: ModuleSpec | None, file: str | None) -> bool:
    """True if a spec loads this file; the file is None for namespaces and built-in modules."""
    if spec is None:
        return False
    if file is None or not spec.has_location or spec.origin is None:
        return file is None and not spec.has_location
    try:
        return spec.origin == file or os.path.samefile(spec.origin, file)
    except OSError:  # it is gone
        return False


def search_path() -> list[str]:
    """``sys.path``, with the directories of loaded modules that it no longer has.

    A relative entry ('' under ``python -c``) means another directory after ``os.chdir``; modules
    imported through it must be found again. Their directories are inserted before it.
    """
    # Going through a thousand modules is slow, so the result is cached until others are loaded.
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
            continue  # some extension modules of packages are listed by their short name, too
        for place in [*(spec.submodule_search_locations or [spec.origin])]:
            if not isinstance(place, str) or not os.path.isabs(place):
                continue  # built in or frozen
            root, base = os.path.split(place)
            if base.partition(".")[0] == name:
                yield root
