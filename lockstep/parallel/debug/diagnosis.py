"""Finds the first layer with values that are not finite, by running the model again.

This runs before training ends with an error, on the share whose loss was not finite. Its result is
a number, so that ranks can exchange it.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree, tensors_of


class Diagnosis:
    """Finds the first value that is not finite.

    Args:
        model: the model.
    """

    nothing: ClassVar[float] = -1.0

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [name for name, _ in model.named_parameters()]
        self._modules = [name for name, _ in model.named_modules()]

    @torch.no_grad()
    def of(self, read: Callable[[], Batch], call: Callable[[Batch], Any]) -> float:
        """A number for ``text``: of a weight, the inputs, or a module's output.

        Args:
            read: returns the batch.
            call: runs the model on it.
        """
        weight = self.of_weights(self._model.parameters())
        if weight != self.nothing:
            return weight
        try:
            batch = read()
            if not _is_finite(batch.inputs):
                return float(len(self._parameters))
            return self._first_module(partial(call, batch))
        except Exception:  # the error to report is that of the loss
            return self.nothing

    def of_weights(self, weights: Iterable[torch.Tensor]) -> float:
        """A number for ``text``: the first of these parameters that is not finite."""
        looked_at = {id(weight) for weight in weights}
        for place, parameter in enumerate(self._model.parameters()):
            if id(parameter) in looked_at and not _is_finite(parameter):
                return float(place)
        return self.nothing

    def shared(self, place: float, board: StatusBoard | None) -> str:
        """The text for the place that the last of all ranks has found; every rank calls it."""
        gathered = [[place]] if board is None else board.all_gather([place])
        return self.text(max(number for (number,) in gathered))

    def text(self, place: float) -> str:
        """The text for a number."""
        index = int(place)
        if index < 0:
            return ""
        if index < len(self._parameters):
            return f"the weight {self._parameters[index]!r} is not finite already"
        index -= len(self._parameters)
        if index == 0:
            return "the inputs are not finite already"
        name = self._modules[index - 1]
        kind = type(self._model.get_submodule(name)).__name__
        return f"first in the output of layer {name!r} ({kind})" if name else ""

    def _first_module(self, call: Callable[[], Any]) -> float:
        found: list[int] = []

        def look(index: int, _: nn.Module, __: Any, output: Any) -> None:
            if not found and not _is_finite(output):
                found.append(index)

        with ExitStack() as hooks:
            for index, module in enumerate(self._model.modules()):
                hook = module.register_forward_hook(partial(look, index))
                hooks.callback(hook.remove)
            call()
        return float(len(self._parameters) + 1 + found[0]) if found else self.nothing


def _is_finite(tree: Tree) -> bool:
    return all(
        bool(torch.isfinite(tensor).all())
        for tensor in tensors_of(tree)
        if tensor.is_floating_point()
    )
