# mypy: ignore-errors
"""What scripts define and hold: a table of objects, and of what is done with each.

To be run as ``__main__`` (``runpy.run_path``), so that nothing here can be imported by name. Every
case returns an object and a function of it, whose result must be the same where it has been sent.
"""

import abc
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import enum
import functools
import importlib
import logging
import random
import sys
import threading
import types
import typing
import weakref
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import odd_modules  # a package that only this script's process has on its path
import torch
import torch.nn.functional as F
from odd_modules import lazy, settings
from odd_modules.sub import json as own_json
from torch import Tensor, nn

CASES: dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {}
ONE = torch.ones(1)


def case(make: Any) -> Any:
    CASES[make.__name__] = make
    return make


# --- modules, and names of submodules of torch ----------------------------------------------------


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes, self.ops, self.backends = 2, [3], "none"

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * self.classes * self.ops[0] + len(self.backends)


@case
def attributes_named_like_submodules_of_torch() -> Any:
    return Classifier(), lambda model: model(ONE).item()


class Images(torch.utils.data.Dataset[Tensor]):
    classes = ("cat", "dog")

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.classes.index("dog"))


@case
def a_dataset_with_classes() -> Any:
    return Images(), lambda data: data[0].item()


@case
def modules_of_unusual_classes() -> Any:
    held = [torch.ops, torch.ops.aten, torch.ops.higher_order, torch.classes, torch.classes.mine]
    held += [torch.backends, torch.backends.mkldnn, torch._dynamo.config, torch.special]
    return held, lambda found: [each.__name__ for each in found]


aten = torch.ops.aten


@case
def operators() -> Any:
    held = aten.add, aten.add.Tensor, torch.ops.prims.add.default, torch.add, torch._C._nn.gelu
    return held, lambda found: (*map(str, found[:3]), found[1] is aten.add.Tensor)


@case
def an_operator_of_higher_order() -> Any:
    return torch.ops.higher_order.cond, lambda found: found is torch.ops.higher_order.cond


@case
def namespaces_as_globals() -> Any:
    return (lambda x: aten.mul(x, 2)), lambda double: double(ONE).item()


@torch.library.custom_op("lockstep_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return x * 3


thrice.register_autograd(lambda ctx, grad: grad * 3)


@thrice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def gradient_of(function: Any) -> float:
    x = torch.ones(1, requires_grad=True)
    function(x).backward()
    assert x.grad is not None
    return x.grad.item()


@case
def an_operator_of_ones_own() -> Any:
    return thrice, gradient_of


@case
def an_operator_of_ones_own_by_name() -> Any:
    return (lambda x: torch.ops.lockstep_tests.thrice(x)), gradient_of


@case
def lazy_modules() -> Any:
    return [lazy, lambda: lazy.value], lambda found: (found[0].value, found[1]())


@case
def what_is_a_module_by_its_place_only() -> Any:
    return [settings, lambda: settings.rate], lambda found: (
        found[0] is importlib.import_module("odd_modules.settings"),
        found[1](),
    )


@case
def a_loader_that_asks_itself() -> Any:
    return odd_modules.Loader("math"), lambda found: found.sqrt(4.0)


@case
def a_module_that_is_an_attribute_of_a_class() -> Any:
    return odd_modules.moved.inner, lambda found: found.value


@case
def submodules_with_names_of_others() -> Any:
    def here() -> str:
        tree = xml.etree.ElementTree.fromstring("<a/>")
        return odd_modules.sub.json.here() + concurrent.futures.Future.__name__ + tree.tag

    return [here, own_json], lambda found: (found[0](), found[1].here())


old = odd_modules.again.double, odd_modules.again.Doubler
importlib.reload(odd_modules.again)


@case
def a_module_that_was_reloaded() -> Any:
    held = [odd_modules.again, odd_modules.again.Doubler(), old[0], old[1]()]
    return held, lambda found: (found[0].double(1), found[1](1), found[2](1), found[3](1))


def made(name: str, kind: type[types.ModuleType] = types.ModuleType) -> types.ModuleType:
    module = kind(name)
    exec("y = 4\ndef add(x): return x + y", vars(module))
    return module


class Options(types.ModuleType):
    @property
    def z(self) -> int:
        return int(self.y) + 1


@case
def modules_made_by_hand() -> Any:
    # The first two have the names of modules that can be imported.
    held = [made("json"), made("json", Options), made("nowhere", Options)]
    return held, lambda found: (found[0].add(1), found[1].z, found[2].z, found[2].__name__)


# --- functions ------------------------------------------------------------------------------------


def plus_one(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args) + 1

    return wrapper


@plus_one
def double(x: Any) -> Any:
    return 2 * x


@functools.lru_cache(maxsize=3)
def cached(x: int) -> int:
    return x + 1


@torch.no_grad()
def without_gradient(x: Tensor) -> Tensor:
    return x * 2


@torch.compile(backend="eager")
def compiled(x: Tensor) -> Tensor:
    return x * 2


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


@functools.singledispatch
def kind_of(x: object) -> str:
    return "any"


@kind_of.register
def _(x: int) -> str:
    return "int"


@contextlib.contextmanager
def three() -> Iterator[int]:
    yield 3


@case
def decorated_functions() -> Any:
    held = [double, cached, without_gradient, compiled, scripted, kind_of]
    return held, lambda found: (
        *(found[0](2), found[0].__name__, found[1](1), found[1].cache_parameters()["maxsize"]),
        *(found[2](torch.ones(1, requires_grad=True)).requires_grad, found[3](ONE).item()),
        *(found[4](ONE).item(), found[5](1), found[5]("")),
    )


@case
def generators_and_recursion() -> Any:
    def fibonacci(n: int) -> int:
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    def count(n: int) -> Iterator[int]:
        yield from range(n)

    held = [fibonacci, count, three]
    return held, lambda found: (found[0](7), list(found[1](3)), found[2]().__enter__())


User = typing.NewType("User", int)
T = typing.TypeVar("T")
P = typing.ParamSpec("P")


@case
def annotations() -> Any:
    def function(x: "Unknown", y: User, *z: T, w: Callable[P, T] | None = None):  # noqa: F821
        return 3

    return function, lambda found: (found(1, 2), found.__annotations__["x"])


@case
def partial_functions_and_methods() -> Any:
    held = [partial(double, 3), partial(F.cross_entropy, reduction="sum"), Images().__getitem__]
    return held, lambda found: (found[0](), found[1].keywords, found[2](0).item())


@case
def transformed_functions() -> Any:
    held = [torch.vmap(lambda x: x * 2), torch.func.grad(lambda x: (x * x).sum())]
    return held, lambda found: [one(torch.ones(2)).tolist() for one in found]


@case
def a_stack_names_the_file() -> Any:
    return double, lambda found: found.__wrapped__.__code__.co_filename


# --- classes --------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


class Options2(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int = 1
    y: "list[int]" = dataclasses.field(default_factory=list)


class Pair(typing.NamedTuple):
    first: int
    second: "str" = "x"


@case
def enumerations_and_records() -> Any:
    held = [Color, Color.RED, Options2.A | Options2.B, Point(2), Pair(1)]
    return held, lambda found: (found[1] is found[0].RED, int(found[2]), found[3].x, found[4])


class Counting(type):
    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        made.tag = cls.__name__
        return made


class Base(abc.ABC):
    kinds: typing.ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Base.kinds[cls.__name__] = "known"

    @abc.abstractmethod
    def name(self) -> str: ...


class Derived(Base):
    class Inner(metaclass=Counting):
        pass

    def name(self) -> str:
        return super().__class__.__name__

    @functools.cached_property
    def once(self) -> int:
        return 4

    @functools.singledispatchmethod
    def kind(self, x: object) -> str:
        return "any"

    @kind.register
    def _(self, x: int) -> str:
        return "int"


@Base.register
class Registered:
    pass


@case
def classes() -> Any:
    held = [Derived(), Derived.Inner(), Registered(), Base]
    return held, lambda found: (
        *(found[0].name(), found[0].once, found[0].kind(1), found[0].kind(""), found[0].kinds),
        *(found[1].tag, type(found[1]).__qualname__, isinstance(found[2], found[3])),
    )


class Box(typing.Generic[T]):
    def get(self, x: T) -> T:
        return x


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


@case
def classes_of_typing_and_autograd() -> Any:
    return [Box[int](), Triple.apply], lambda found: (found[0].get(1), gradient_of(found[1]))


class Wrapper:
    """Passes on what it has not, and so asks itself where it has nothing yet."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@case
def a_wrapper_that_passes_on() -> Any:
    return Wrapper(Derived()), lambda found: found.once


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(1, 1), nn.BatchNorm1d(1)
        nn.init.constant_(self.layer.weight, 3.0)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


@case
def torchscript() -> Any:
    traced = torch.jit.trace(Scripted().eval(), torch.ones(2, 1))
    held = [torch.jit.script(Scripted().eval()), traced]
    return held, lambda found: [one(torch.ones(2, 1)).tolist() for one in found]


# --- objects --------------------------------------------------------------------------------------


class Holder:
    def __init__(self, held: Any) -> None:
        self.held, self.reference = held, weakref.ref(held)


@case
def weak_references() -> Any:
    held = Derived()
    values = weakref.WeakValueDictionary({"a": held})
    keys = weakref.WeakKeyDictionary({held: 1})
    objects = [Holder(held), values, keys, weakref.WeakSet([held]), weakref.ref(Derived())]
    return objects, lambda found: (
        found[0].reference() is found[0].held is found[1]["a"],
        found[2][found[0].held],
        found[0].held in found[3],
        found[4](),
    )


level = contextvars.ContextVar("level", default=3)
depth: contextvars.ContextVar[int] = contextvars.ContextVar("depth")
depth.set(2)


@case
def context_variables() -> Any:
    return [lambda: level.get(), depth], lambda found: (found[0](), found[1].get())


@case
def loggers() -> Any:
    log = logging.getLogger("mine")
    return [lambda: log.name, log], lambda found: (
        found[0](),
        found[1] is logging.getLogger("mine"),
    )


@case
def random_generators() -> Any:
    torch_generator = torch.Generator().manual_seed(3)
    torch.rand(1, generator=torch_generator)
    held = [torch_generator, np.random.default_rng(1), np.random.RandomState(2), random.Random(3)]
    held[1].random()
    return held, lambda found: (
        *(torch.rand(1, generator=found[0]).item(), found[1].random()),
        *(found[2].rand(), found[3].random()),
    )


@case
def limits_of_types() -> Any:
    return [torch.finfo(torch.float16), torch.iinfo(torch.int8)], lambda found: (
        found[0].max,
        found[1].min,
    )


@case
def what_an_importable_module_holds() -> Any:
    return [odd_modules.lock, odd_modules.variable], lambda found: (
        found[0] is odd_modules.lock,
        found[1] is odd_modules.variable,
    )


# --- what cannot be sent --------------------------------------------------------------------------

lock = threading.Lock()


def with_lock(output: Tensor, target: Tensor) -> Tensor:
    with lock:
        return (output - target).square().mean()


class Locked(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.parts = {"file": sys.stderr.buffer}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2), torch.ones(1)


def numbers() -> Any:
    pending = (number for number in range(3))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() * next(pending)

    return partial(loss)
