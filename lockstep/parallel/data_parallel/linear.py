"""Linear layers whose weight gradients are formed where they are needed.

Autograd gives every gradient memory of its own, from where it would have to be copied to memory
that all ranks see. For large weights that copy, and the sum over the shares, cost more than the
optimizer's step. So while a pass runs, ``F.linear`` on the model's own weights goes to an autograd
function that hands the two factors of the weight's gradient, inputs and output gradients, to the
exchange: it multiplies them right into shared memory, or puts them up as they are
(``comm.collectives.shm_gradient_buffer``). So does ``torch.matmul(input, weight)``, whose weight
lies the other way round, (ins, outs): that is what Keras's Dense layers call.

Forward and input gradient go to the library that multiplies faster on this processor
(``comm.collectives.products``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from lockstep.comm.collectives.products import has_faster_onednn, product
from lockstep.parallel.data_parallel.functional_patch import Redirection

# Gets the number of a weight of shape (a, b), and the factors of its gradient, of shapes (n, b) and
# (n, a): inputs and output gradients, or the other way round.
Take = Callable[[int, torch.Tensor, torch.Tensor], None]

_linear = Redirection("linear")
_matmul = Redirection("matmul", torch)


class LinearLayers:
    """The weights whose layers run here.

    Args:
        weights: trainable parameters of two dims, by number.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor]) -> None:
        self._numbers = {id(weight): number for number, weight in weights.items()}
        self._weights = dict(weights)  # an id is good only while its object lives
        self._ends = {number: get_gradient_edge(weight).node for number, weight in weights.items()}
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._take: Take | None = None

    def applied(self) -> AbstractContextManager[None]:
        """``F.linear`` and ``torch.matmul`` go here within the block, in this thread."""
        return self._redirected() if self._weights else nullcontext()

    @contextmanager
    def _redirected(self) -> Iterator[None]:
        with _linear.to(self.linear), _matmul.to(self.matmul):
            yield

    @contextmanager
    def taken(self, take: Take) -> Iterator[None]:
        """Within the block, backward hands factors to ``take`` instead of giving gradients."""
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def take(self, number: int, factors: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Hand on the factors of a weight's gradient, if that is what this backward is for.

        Backward may run within the forward pass or within another backward (``autograd.grad`` for a
        penalty, an implicit layer): its gradients are asked for there and go nowhere else.
        """
        if self._take is None or not _is_reached(self._ends[number]):
            return False
        self._take(number, *factors)
        return True

    def cast(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """A weight in the type to compute in: one copy per pass, however often it is used."""
        weight = self._weights[number].detach()
        if weight.dtype == dtype:
            return weight
        key = number, dtype
        if key not in self._casts:
            self._casts[key] = weight.to(dtype)
        return self._casts[key]

    def begin_pass(self) -> None:
        """The weights may have changed."""
        self._casts.clear()

    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What ``F.linear`` is while a pass runs."""
        number = self._numbers.get(id(weight))
        if number is None or not _is_ordinary(input, weight, weight.shape[1], bias):
            plain: torch.Tensor = _linear.plain(input, weight, bias)
            return plain
        dtype = _autocast_dtype(input.device.type)
        if dtype is not None and weight.dtype == torch.float32:
            input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
        output: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, self, number, False
        )
        return output

    def matmul(self, input: torch.Tensor, other: torch.Tensor, **out: Any) -> torch.Tensor:
        """What ``torch.matmul`` is while a pass runs."""
        number = self._numbers.get(id(other))
        if (
            number is None
            or out
            or not _is_ordinary(input, other, other.shape[0])
            or _autocast_dtype(input.device.type) is not None
        ):
            plain: torch.Tensor = _matmul.plain(input, other, **out)
            return plain
        output: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            input, other, None, self, number, True
        )
        return output


def _is_ordinary(
    input: torch.Tensor, weight: torch.Tensor, ins: int, bias: torch.Tensor | None = None
) -> bool:
    """Whether this is a call on plain tensors, in a pass that may go backward."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and type(input) is torch.Tensor
        and input.layout == torch.strided
        and input.is_floating_point()
        and input.dtype in _dtypes(weight, input.device.type)
        and input.numel() > 0
        and input.shape[-1:] == (ins,)
        and (bias is None or bias.shape == weight.shape[:1])
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _is_reached(end: torch.autograd.graph.Node) -> bool:
    """Whether the backward that runs now leads to the ``.grad`` of the parameter behind ``end``."""
    try:
        return bool(torch._C._will_engine_execute_node(end))
    except RuntimeError:  # it gives the gradient back instead
        return False


def _dtypes(weight: torch.Tensor, device_type: str) -> tuple[torch.dtype, ...]:
    """Input types that go with a weight."""
    dtype = _autocast_dtype(device_type)
    if dtype is not None and weight.dtype == torch.float32:
        return weight.dtype, dtype
    return (weight.dtype,)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that autocast has such a device compute in; None where it is off."""
    # Some devices ("meta") have no autocast, and cannot be asked whether it is on.
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


class _Linear(torch.autograd.Function):
    """``input @ weight.T + bias``, or ``input @ weight``; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layers: LinearLayers,
        number: int,
        is_turned: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.cast, ctx.layers, ctx.number = layers.cast(number, input.dtype), layers, number
        ctx.is_turned = is_turned
        return _product(input, ctx.cast.t() if is_turned else ctx.cast, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradients = gradient.reshape(-1, gradient.shape[-1])
        inputs = input.reshape(-1, input.shape[-1])
        # Where backward is itself differentiated, all that it does must be seen by autograd.
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
        return input_gradient, weight_gradient, bias_gradient, None, None, None


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``input @ weight.T + bias`` by the faster library."""
    is_plain = input.device.type != "cpu" or input.dtype != torch.float32
    if is_plain or torch.is_grad_enabled() or not has_faster_onednn():
        plain: torch.Tensor = _linear.plain(input, weight, bias)
        return plain
    return product(input, weight, bias)
