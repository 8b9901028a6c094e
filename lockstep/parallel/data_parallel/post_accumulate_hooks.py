"""When backward has completed the gradient of a parameter."""

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

    Autograd visits a parameter once in a backward pass, when all that has used it is done; also if
    no gradient comes to it, since somebody took the factors (``parallel.data_parallel.linear``). A
    parameter that the loss does not depend on is not visited, and one that is frozen has nothing to
    wait for.
    """

    def visited(number: int, *_: Any) -> None:
        tell(number)

    nodes = {  # held: layers that are computed again in backward are to find the same
        number: get_gradient_edge(parameter).node
        for number, parameter in enumerate(parameters)
        if parameter.requires_grad
    }
    with ExitStack() as hooks:
        for number, node in nodes.items():
            hooks.callback(node.register_hook(partial(visited, number)).remove)
        yield
