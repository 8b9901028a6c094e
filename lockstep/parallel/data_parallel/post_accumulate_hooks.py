"""Reports when backward has completed the gradient of a parameter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


@contextmanager
def on_grad_ready(
    parameters: Sequence[torch.Tensor], tell: Callable[[int], None]
) -> Iterator[None]:
    """Within the block, ``tell`` gets the number of each parameter whose gradient is complete.

    Autograd visits a parameter once in a backward pass, after all its uses; even without a
    gradient, if its factors were taken (``parallel.data_parallel.linear``). A parameter that the
    loss does not depend on is not visited, and a frozen one has no gradient.
    """

    def visited(number: int, *_: Any) -> None:
        tell(number)

    nodes = {  # kept, so that layers recomputed in backward get the same nodes
        number: get_gradient_edge(parameter).node
        for number, parameter in enumerate(parameters)
        if parameter.requires_grad
    }
    with ExitStack() as hooks:
        for number, node in nodes.items():
            hooks.callback(node.register_hook(partial(visited, number)).remove)
        yield
