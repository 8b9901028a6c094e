"""Gradients of a custom loop are placed in shared memory, where the other replicas read them.

Each gradient is moved during backward as soon as it is complete, and ``.grad`` then is its place:
changes of ``.grad`` before ``step`` are made there. Gradients of linear layers are not moved, but
computed in their places. For that torch functions are redirected
(``parallel.data_parallel.linear``) while the optimizer exists, and not for one pass as in a Worker:
the begin of a pass is unknown, and layers that run again in backward must run as in forward.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from lockstep.comm.collectives.matrix_products import multiply
from lockstep.parallel.data_parallel.linear import LinearLayers
from lockstep.parallel.data_parallel.passes import LARGE_WEIGHT


class GradientPlaces(LinearLayers):
    """The places of the trained parameters' gradients.

    Args:
        parameters: the trained ones.
        places: of their gradients.

    Attributes:
        is_open: True if gradients are written to their places now.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        super().__init__(
            {
                number: one
                for number, one in enumerate(parameters)
                if one.dim() == 2 and one.numel() >= LARGE_WEIGHT
            }
        )
        self.is_open = True
        self._parameters = parameters
        self._places = places

    def serve(self, owner: object) -> None:
        """Place gradients while the owner exists; this object must not refer to it."""
        stack = ExitStack()
        for number, parameter in enumerate(self._parameters):
            hook = parameter.register_post_accumulate_grad_hook(partial(self._move, number))
            stack.callback(hook.remove)
        stack.enter_context(self.applied())
        stack.enter_context(self.taken(self._form))
        weakref.finalize(owner, stack.close)

    def _move(self, number: int, parameter: torch.Tensor) -> None:
        """Move a gradient that this backward pass has completed to its place."""
        gradient, place = parameter.grad, self._places[number]
        if not self.is_open or gradient is None:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
            parameter.grad = place

    def take(self, number: int, factors: tuple[torch.Tensor, torch.Tensor]) -> bool:
        weight = self._weights[number]
        has_hooks = weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > 1
        if has_hooks or not self.is_open:  # hooks need the gradient itself
            return False
        return super().take(number, factors)

    @torch.no_grad()
    def _form(self, number: int, inputs: torch.Tensor, output_gradients: torch.Tensor) -> None:
        weight, place = self._weights[number], self._places[number]
        if weight.grad is None:
            multiply(place, output_gradients, inputs, adds=False)
            weight.grad = place
        else:
            multiply(weight.grad, output_gradients, inputs, adds=True)
