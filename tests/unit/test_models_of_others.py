"""What models of others do in forward: they ask whether they are traced, and keep caches.

Each is shown by a small module; ``tests/parity/test_architectures.py`` has the real ones.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.capture.calls import telling
from lockstep.capture.replaying import is_same
from lockstep.capture.tracing import Trace, run_trace, trace_model
from lockstep.data.order import seed_streams
from tests.unit.test_tracing import Around, Odd, atomic_of, built, gradients_of_cut, samples
from tests.unit.test_tracing import names_of as layers_of

# --- models that ask whether they are traced ------------------------------------------------------


class Asking(nn.Module):
    """Leaves a mask out where it would change nothing, which a trace cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.asked: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = x.detach().abs() < 100
        x = self.first(x)
        if torch.compiler.is_compiling() or not mask.all():
            x = x.masked_fill(~mask, 0.0)
        masked: Tensor = self.last(x)
        return masked


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_model_that_looks_at_values_is_told_that_it_is_traced(training: bool) -> None:
    model = built(Asking)
    trace = trace_model(model, samples(6), training=training)
    assert (layers_of(trace), atomic_of(trace)) == (["first", "last"], {})
    assert not torch.compiler.is_compiling()
    hidden = samples(6, num_samples=9).index_fill(1, torch.tensor(2), 1e3)
    for inputs in (samples(6), hidden):  # the mask that was left out for the example is there
        assert torch.equal(run_trace(trace, model, inputs), model(inputs))


def test_a_model_that_does_something_else_when_told_is_not_told() -> None:
    def scale(module: Odd, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x * 1.001
        return x if x.sum() > 0 else x.neg()

    model = built(lambda: Around(Odd(scale)))
    trace = trace_model(model, samples(6), training=True)
    (reason,) = atomic_of(trace).values()
    assert reason.startswith("uses a tensor's values outside torch (__bool__) (test_models_of_")
    assert torch.equal(run_trace(trace, model, samples(6)), model(samples(6)))


def test_who_needs_not_be_told_is_not() -> None:
    def ask(module: Odd, x: Tensor) -> Tensor:
        told.append(torch.compiler.is_compiling())
        return x

    told: list[bool] = []
    trace_model(built(lambda: Around(Odd(ask))), samples(6), training=True)
    assert set(told) == {False}


def test_layers_that_are_called_as_a_whole_are_not_told() -> None:
    """They run later as they are."""

    seen: list[bool] = []

    def ask(module: Odd, x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x

    model = built(lambda: nn.Sequential(Asking(), Odd(ask)))
    trace = trace_model(model, samples(6), training=True, atomic={"1": "a test"})
    assert layers_of(trace) == ["0.first", "0.last", "1"]
    with telling(False):
        run_trace(trace, model, samples(6))
    # But for the plain call that compares what it does when told with what it does otherwise.
    assert seen.count(True) == 1


# --- objects that are made in forward -------------------------------------------------------------


class Cache:
    """As language models have them: what layers leave to later calls."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.sizes: dict[str, int] = {}
        self.kind = Cache

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        self.sizes["rows"] = key.shape[0]
        return torch.stack(self.keys).sum(0)


class Caching(nn.Module):
    """Hands a cache from layer to layer, and returns it."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(3)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return {"x": x, "cache": cache}


class CachedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return torch.tanh(cache.update(self.linear(x)))


class LookingLayer(CachedLayer):
    """Called as a whole, as it looks at values; the cache goes in and is not changed."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        known: Tensor | int = cache.keys[-1] if cache.keys else 0
        return self.linear(x) + known if x.sum() > -1e9 else x


class ChangingLayer(CachedLayer):
    """Called as a whole, and changes what it is given."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return super().forward(x, cache) if x.sum() > -1e9 else x


def check_trace(trace: Trace, model: nn.Module, inputs: Tensor) -> None:
    seed_streams(5)
    traced = run_trace(trace, model, inputs)
    plain = model(inputs)
    assert is_same(traced, plain)
    assert traced["cache"].sizes == plain["cache"].sizes
    assert type(traced["cache"]) is Cache


def test_a_cache_crosses_cuts_and_leaves_the_model() -> None:
    model = built(lambda: Caching(CachedLayer))
    trace = trace_model(model, samples(6), training=True)
    assert layers_of(trace) == [f"layers.{number}.linear" for number in range(3)]
    for inputs in (samples(6), samples(6, num_samples=9)):
        check_trace(trace, model, inputs)
    whole = gradients_of_cut(trace, model, samples(6), 3)
    for cut in (1, 2):
        for one, other in zip(gradients_of_cut(trace, model, samples(6), cut), whole, strict=True):
            assert one is not None
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_each_time_a_trace_runs_its_objects_are_new() -> None:
    model = built(lambda: Caching(CachedLayer))
    trace = trace_model(model, samples(6), training=False)
    first, second = (run_trace(trace, model, samples(6))["cache"] for _ in range(2))
    assert first is not second
    assert first.keys is not second.keys
    assert len(first.keys) == 3


def test_a_layer_that_is_called_as_a_whole_may_be_given_an_object() -> None:
    class Mixed(Caching):
        def __init__(self) -> None:
            super().__init__(CachedLayer)
            self.layers[1] = LookingLayer()

    model = built(Mixed)
    trace = trace_model(model, samples(6), training=True)
    assert layers_of(trace) == ["layers.0.linear", "layers.1", "layers.2.linear"]
    check_trace(trace, model, samples(6, num_samples=9))


def test_an_object_that_is_changed_in_a_layer_keeps_its_users_together() -> None:
    model = built(lambda: Caching(ChangingLayer))
    trace = trace_model(model, samples(6), training=True)
    assert layers_of(trace) == [""]
    assert trace.layers[0].reason.startswith("hands an object to a layer that changes it (")
    check_trace(trace, model, samples(6))


def test_an_object_that_holds_itself_is_not_made_anew() -> None:
    class Knot:
        def __init__(self, x: Tensor) -> None:
            self.x, self.me = x, self

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x), Knot(x)

    trace = trace_model(built(Tied), samples(6), training=True)
    assert atomic_of(trace) == {"": "passes on a Knot that holds itself"}
