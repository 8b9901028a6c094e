"""Linear layers while a pass runs: the same values, and gradients that go where they are taken."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.data_parallel import linear
from lockstep.parallel.data_parallel.linear import LinearLayers


class Taken:
    """Sums what is taken, as the exchange does."""

    def __init__(self, weight: Tensor) -> None:
        self.gradient = torch.zeros_like(weight)
        self.calls = 0

    def __call__(self, number: int, inputs: Tensor, gradients: Tensor) -> None:
        assert number == 7
        self.gradient += gradients.to(self.gradient).T @ inputs.to(self.gradient)
        self.calls += 1


class Dense(nn.Linear):
    """As Keras's: the weight lies the other way round."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__(outs, ins)
        self.bias = nn.Parameter(torch.randn(outs))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.matmul(inputs, self.weight) + self.bias


KINDS = [nn.Linear, Dense]


def make_layer(
    dtype: torch.dtype = torch.float64, kind: type[nn.Linear] = nn.Linear
) -> tuple[nn.Linear, LinearLayers]:
    torch.manual_seed(0)
    layer = kind(6, 5).to(dtype)
    return layer, LinearLayers({7: layer.weight})


def assert_close(found: Tensor | None, expected: Tensor | None, tolerance: float = 1e-13) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, kind: type[nn.Linear]
) -> None:
    layer, layers = make_layer(dtype, kind)
    inputs = torch.randn(shape, dtype=dtype, requires_grad=True)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    expected = layer(inputs)
    wanted = torch.autograd.grad(expected.square().sum(), [inputs, *layer.parameters()])
    taken = Taken(layer.weight)
    with layers.applied():
        found = layer(inputs)
    with layers.taken(taken):
        found.square().sum().backward()
    assert_close(found, expected, tolerance)
    assert_close(inputs.grad, wanted[0], tolerance)
    assert layer.weight.grad is None
    assert_close(taken.gradient, wanted[1], tolerance)
    assert_close(layer.bias.grad, wanted[2], tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_taker_the_weight_has_its_gradient(kind: type[nn.Linear]) -> None:
    layer, layers = make_layer(kind=kind)
    inputs = torch.randn(4, 6, dtype=torch.float64)
    with layers.applied():
        (found,) = torch.autograd.grad(layer(inputs).square().sum(), [layer.weight])
    (expected,) = torch.autograd.grad(layer(inputs).square().sum(), [layer.weight])
    assert_close(found, expected)


def penalty(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """A loss that goes twice through the layer's gradient."""
    inputs = inputs.clone().requires_grad_()
    output = torch.tanh(layer(inputs))
    (slope,) = torch.autograd.grad(output.sum(), [inputs], create_graph=True)
    return output.square().sum() + slope.square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_penalty_is_exact(kind: type[nn.Linear]) -> None:
    layer, layers = make_layer(kind=kind)
    inputs = torch.randn(4, 6, dtype=torch.float64)
    expected = torch.autograd.grad(penalty(layer, inputs), list(layer.parameters()))
    taken = Taken(layer.weight)
    with layers.applied():
        loss = penalty(layer, inputs)
    with layers.taken(taken):
        loss.backward()
    own = torch.zeros_like(layer.weight) if layer.weight.grad is None else layer.weight.grad
    assert_close(own + taken.gradient, expected[0])
    assert_close(layer.bias.grad, expected[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_takes_each_gradient_once(kind: type[nn.Linear], use_reentrant: bool) -> None:
    layer, layers = make_layer(kind=kind)
    inputs = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.tanh(layer(inputs)).sum(), [layer.weight])
    taken = Taken(layer.weight)
    with layers.applied():
        output = checkpoint(
            lambda value: torch.tanh(layer(value)), inputs, use_reentrant=use_reentrant
        )
        with layers.taken(taken):
            output.sum().backward()
    assert taken.calls == 1
    assert_close(taken.gradient, expected)


def test_autocast_computes_in_bfloat16_and_keeps_the_weight() -> None:
    layer, layers = make_layer(torch.float32)
    inputs = torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(inputs)
        with layers.applied():
            found = layer(inputs)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    taken = Taken(layer.weight)
    wanted = torch.autograd.grad(expected.sum(), [inputs, layer.weight])
    with layers.taken(taken):
        found.sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, wanted[0])
    assert_close(taken.gradient, wanted[1], 2e-2)


def test_autocast_is_that_of_the_inputs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without memory, as if it had an autocast; that of cores is off."""
    monkeypatch.setattr(torch.amp, "is_autocast_available", "meta".__eq__)
    monkeypatch.setattr(torch, "is_autocast_enabled", "meta".__eq__)
    monkeypatch.setattr(torch, "get_autocast_dtype", {"meta": torch.bfloat16}.__getitem__)
    layer = nn.Linear(6, 5, device="meta")
    layers = LinearLayers({7: layer.weight})
    inputs = torch.randn(4, 6, device="meta", requires_grad=True)
    with layers.applied():
        found = layer(inputs)
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    dense = Dense(6, 5).to("meta")
    with LinearLayers({7: dense.weight}).applied():  # whose casts are torch's
        assert "_Linear" not in str(torch.matmul(inputs, dense.weight).grad_fn)


def test_only_on_cores_is_there_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_faster_onednn", lambda: True)
    monkeypatch.setattr(linear, "product", lambda *_: pytest.fail("asked for a device"))
    layer = nn.Linear(6, 5, device="meta")
    with LinearLayers({7: layer.weight}).applied():
        layer(torch.randn(4, 6, device="meta", requires_grad=True)).sum().backward()


def test_what_else_matmul_does_goes_to_torch() -> None:
    layer, layers = make_layer(kind=Dense)
    inputs = torch.randn(4, 6, dtype=torch.float64)
    out = torch.empty(4, 5, dtype=torch.float64)
    with layers.applied():
        assert "_Linear" in str(torch.matmul(inputs, layer.weight).grad_fn)
        assert "_Linear" not in str(torch.matmul(inputs, layer.weight * 2).grad_fn)
        assert "_Linear" not in str(torch.matmul(layer.weight, inputs[:, :5].T).grad_fn)
        assert torch.matmul(inputs, other=layer.weight).shape == (4, 5)
        with torch.no_grad():
            torch.matmul(inputs, layer.weight, out=out)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(torch.randn(4, 3, dtype=torch.float64))
    assert_close(out, inputs @ layer.weight)


def test_what_is_no_ordinary_call_goes_to_torch() -> None:
    layer, layers = make_layer()
    other = nn.Linear(6, 5).double()
    inputs = torch.randn(4, 6, dtype=torch.float64)
    with layers.applied():
        assert "_Linear" not in str(other(inputs).grad_fn)
        assert "_Linear" not in str(F.linear(inputs, layer.weight * 2).grad_fn)
        with torch.no_grad():
            assert layer(inputs).grad_fn is None
        batched = torch.func.vmap(layer)(inputs)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(torch.randn(4, 3, dtype=torch.float64))
    assert_close(batched, layer(inputs))
    assert F.linear is torch._C._nn.linear


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_jacobians_by_torch_func_are_those_of_torch() -> None:
    layer, layers = make_layer()
    sample = torch.randn(6, dtype=torch.float64)
    with layers.applied():
        reverse, forward = torch.func.jacrev(layer)(sample), torch.func.jacfwd(layer)(sample)
    assert_close(reverse, layer.weight)
    assert_close(forward, layer.weight)


def test_a_gradient_taken_within_backward_goes_where_it_is_asked_for() -> None:
    """Implicit layers: a hook that goes backward through another graph of the same layer."""
    layer, layers = make_layer()
    square = nn.Linear(5, 6).double()

    def compute() -> Tensor:
        inputs = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        inner = torch.tanh(square(torch.tanh(layer(inputs))))
        output = torch.tanh(layer(inputs * 2))
        output.register_hook(
            lambda gradient: (
                gradient
                + torch.autograd.grad(inner, inputs, gradient.sum() + 0 * inner, retain_graph=True)[
                    0
                ][:5]
            )
        )
        return output.sum()

    (expected,) = torch.autograd.grad(compute(), [layer.weight])
    taken = Taken(layer.weight)
    with layers.applied():
        loss = compute()
    with layers.taken(taken):
        loss.backward()
    assert taken.calls == 1
    assert_close(taken.gradient, expected)


def test_an_adjoint_gets_the_gradients_that_it_asks_for() -> None:
    layer, layers = make_layer()

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(inputs)
            return layer(inputs)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (inputs,) = ctx.saved_tensors
            with torch.enable_grad():
                again = inputs.detach().requires_grad_()
                output = layer(again)
            return torch.autograd.grad(output, [again, layer.weight], gradient)

    inputs = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(inputs).square().sum(), [layer.weight])
    taken = Taken(layer.weight)
    with layers.applied():
        output = Adjoint.apply(inputs, layer.weight)  # type: ignore[no-untyped-call]
        with layers.taken(taken):
            output.square().sum().backward()
    assert taken.calls == 0
    assert_close(layer.weight.grad, expected)


def test_complex_layers_go_to_torch() -> None:
    layer = nn.Linear(6, 5, dtype=torch.complex128)
    layers = LinearLayers({7: layer.weight})
    with layers.applied():
        output = layer(torch.randn(4, 6, dtype=torch.complex128))
    assert "_Linear" not in str(output.grad_fn)


def test_a_weight_is_cast_once_per_pass() -> None:
    layer, layers = make_layer(torch.float32)
    first = layers.cast(7, torch.bfloat16)
    assert layers.cast(7, torch.bfloat16) is first
    with torch.no_grad():
        layer.weight.add_(1)
    layers.begin_pass()
    assert not torch.equal(layers.cast(7, torch.bfloat16), first)
