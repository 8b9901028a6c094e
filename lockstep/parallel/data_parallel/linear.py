"""Linear layers whose weight gradients are computed in the memory of the exchange.

Autograd allocates every gradient, which would have to be copied to memory that all ranks share. For
large weights that copy, and the sum over the shares, cost more than the optimizer's step. So while
a pass runs, ``F.linear`` on the model's own weights calls an autograd function that gives the two
factors of the weight's gradient, inputs and output gradients, to the exchange: it multiplies them
into shared memory, or publishes the factors (``comm.collectives.shm_gradient_buffer``). So does
``torch.matmul(input, weight)``, which Keras's Dense layers call, with a weight (ins, outs).

The faster library on this processor computes outputs and input gradients
(``comm.collectives.matrix_products``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from lockstep.comm.collectives.matrix_products import has_faster_onednn, product
from lockstep.parallel.data_parallel.functional_patch import Redirection
from lockstep.parallel.settings import autocast_dtype

# Gets the number of a weight of shape (a, b), and the factors of its gradient, of shapes (n, b) and
# (n, a): inputs and output gradients, or in reverse.
Take = Callable[[int, torch.Tensor, torch.Tensor], None]

_linear = Redirection("linear")
_matmul = Redirection("matmul", torch)


class LinearLayers:
    """Linear layers of some weights.

    Args:
        weights: trainable parameters of two dims, by number.

    Attributes:
        taker: what backward gives factors to instead of gradients, see ``taken``; None for nothing.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor]) -> None:
        self._numbers = {id(weight): number for number, weight in weights.items()}
        self._weights = dict(weights)  # an id is valid only while its object lives
        self._ends = {number: get_gradient_edge(weight).node for number, weight in weights.items()}
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.taker: Take | None = None

    def __bool__(self) -> bool:
        return bool(self._weights)

    def applied(self) -> AbstractContextManager[None]:
        """Redirects ``F.linear`` and ``torch.matmul`` within the block, in this thread."""
        return _Redirected(self) if self._weights else nullcontext()

    @contextmanager
    def taken(self, take: Take) -> Iterator[None]:
        """Within the block, backward gives factors to ``take`` instead of gradients."""
        self.taker = take
        try:
            yield
        finally:
            self.taker = None

    def take(self, number: int, factors: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Pass on the factors of a weight's gradient, if this backward computes ``.grad``.

        Backward may run within the forward pass or within another backward (``autograd.grad`` for a
        penalty, an implicit layer): its gradients are used only there.
        """
        if self.taker is None or not _is_reached(self._ends[number]):
            return False
        self.taker(number, *factors)
        return True

    def cast(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """A weight in the type of the computation: one copy per pass for all its uses."""
        weight = self._weights[number].detach()
        if weight.dtype == dtype:
            return weight
        key = number, dtype
        if key not in self._casts:
            self._casts[key] = weight.to(dtype)
        return self._casts[key]

    def begin_pass(self) -> None:
        """Drop the casts: the weights may have changed."""
        self._casts.clear()

    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The replacement of ``F.linear`` while a pass runs."""
        output: torch.Tensor
        number = self._numbers.get(id(weight))
        if number is not None and not torch.compiler.is_compiling():
            dtype = autocast_dtype(input.device.type)
            if _is_ordinary(input, weight, weight.shape[1], dtype, bias):
                if dtype is not None and weight.dtype == torch.float32:
                    input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
                layer = self, number, False
                output = _Linear.apply(input, weight, bias, layer)  # type: ignore[no-untyped-call]
                return output
        output = _linear.plain(input, weight, bias)
        return output

    def matmul(self, input: torch.Tensor, other: torch.Tensor, **out: Any) -> torch.Tensor:
        """The replacement of ``torch.matmul`` while a pass runs."""
        output: torch.Tensor
        number = self._numbers.get(id(other))
        if not (number is None or out or torch.compiler.is_compiling()):
            dtype = autocast_dtype(input.device.type)
            if dtype is None and _is_ordinary(input, other, other.shape[0], None):
                layer = self, number, True
                output = _Linear.apply(input, other, None, layer)  # type: ignore[no-untyped-call]
                return output
        output = _matmul.plain(input, other, **out)
        return output


class _Redirected(AbstractContextManager[None]):
    def __init__(self, layers: LinearLayers) -> None:
        self._layers = layers

    def __enter__(self) -> None:
        self._before = _linear.begin(self._layers.linear), _matmul.begin(self._layers.matmul)

    def __exit__(self, *error: object) -> None:
        linear, matmul = self._before
        _matmul.end(matmul)
        _linear.end(linear)


def _is_ordinary(
    input: torch.Tensor,
    weight: torch.Tensor,
    ins: int,
    autocast: torch.dtype | None,
    bias: torch.Tensor | None = None,
) -> bool:
    """True for a call on plain tensors, in a pass that may go backward."""
    fits = input.dtype == weight.dtype
    if autocast is not None and weight.dtype == torch.float32:
        fits |= input.dtype == autocast
    return (
        fits
        and torch.is_grad_enabled()
        and type(input) is torch.Tensor
        and input.layout == torch.strided
        and input.is_floating_point()
        and input.numel() > 0
        and input.shape[-1:] == (ins,)
        and (bias is None or bias.shape == weight.shape[:1])
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _is_reached(end: torch.autograd.graph.Node) -> bool:
    """True if the current backward accumulates the ``.grad`` of the parameter of ``end``."""
    try:
        return bool(torch._C._will_engine_execute_node(end))
    except RuntimeError:  # this backward returns the gradient
        return False


class _Linear(torch.autograd.Function):
    """``input @ weight.T + bias``, or ``input @ weight``; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: tuple[LinearLayers, int, bool],
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layers, ctx.number, ctx.is_turned = layer
        ctx.cast = ctx.layers.cast(ctx.number, input.dtype)
        return _product(input, ctx.cast.t() if ctx.is_turned else ctx.cast, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradients = gradient.reshape(-1, gradient.shape[-1])
        inputs = input.reshape(-1, input.shape[-1])
        # If backward is itself differentiated, autograd must record all of its operations.
        is_last = not torch.is_grad_enabled()
        cast = ctx.cast if is_last else weight.to(input.dtype)
        input_gradient = weight_gradient = None
        if needs_input:
            turned = cast if ctx.is_turned else cast.t()
            input_gradient = _product(gradients, turned, None).view(input.shape)
        factors = (gradients, inputs) if ctx.is_turned else (inputs, gradients)
        if needs_weight and not (is_last and ctx.layers.take(ctx.number, factors)):
            weight_gradient = (factors[1].t() @ factors[0]).to(weight.dtype)
        bias_gradient = gradients.sum(0) if needs_bias else None
        return input_gradient, weight_gradient, bias_gradient, None


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``input @ weight.T + bias`` by the faster library."""
    is_plain = input.device.type != "cpu" or input.dtype != torch.float32
    if is_plain or torch.is_grad_enabled() or not has_faster_onednn():
        plain: torch.Tensor = _linear.plain(input, weight, bias)
        return plain
    return product(input, weight, bias)
