"""Backward passes that start from given gradients, or leave none.

``torch.autograd.backward(tensors, gradients)`` imports sympy at its first call, to compare shapes:
half a second in every process. So these call autograd's engine, or go backward from a scalar whose
derivatives are the given gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *tensors: torch.Tensor) -> Any:
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *ones: torch.Tensor) -> Any:
        return None, *ctx.gradients


def seeded(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar whose ``backward`` continues with the given gradient of each tensor.

    Args:
        tensors: with a history, or that need gradients; at least one.
        gradients: of each, of its shape.
    """
    scalar: torch.Tensor = _Seeded.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return scalar


def go_backward(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add the gradients of all leaves to their ``.grad``.

    Args:
        tensors: to begin from; each needs gradients.
        gradients: of each, of its shape and dtype.
    """
    _run_engine(tensors, gradients, (), accumulate=True)


def gradients_from(
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the wanted tensors, as fast as autograd can; none is left in ``.grad``.

    Args:
        tensors: to begin from; no reentrant checkpoint may have made them.
        gradients: of each, of its shape and dtype.
        wanted: leaves, at least one; the result has None for those that were not used.
    """
    return _run_engine(tensors, gradients, wanted, accumulate=False)


def _run_engine(
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    *,
    accumulate: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Autograd's engine, whose graph is freed; no wanted tensors are all leaves."""
    found: tuple[torch.Tensor | None, ...]
    found = torch.autograd.Variable._execution_engine.run_backward(
        tuple(tensors),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        tuple(wanted),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return found


def gradients_of(
    roots: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Like ``torch.autograd.grad`` with ``allow_unused``, also through reentrant checkpoints.

    Those allow only ``backward``, which leaves gradients in ``.grad`` and calls their hooks. This
    function leaves none and calls none.

    Args:
        roots: scalars.
        tensors: whose gradients are wanted.
        parameters: all that backward may reach.
    """
    if not has_reentrant_checkpoint(roots):
        return list(torch.autograd.grad(roots, tensors, allow_unused=True))
    found: dict[int, torch.Tensor] = {}
    inner = {id(one): one for one in tensors if not one.is_leaf}
    leaves = {id(one): one for one in (*tensors, *parameters) if one.is_leaf}
    with ExitStack() as hooks, _without_gradients([*leaves.values()]):
        for key, one in inner.items():
            hooks.callback(one.register_hook(partial(found.__setitem__, key)).remove)
        torch.autograd.backward(roots)
        found |= {key: one.grad for key, one in leaves.items() if one.grad is not None}
    return [found.get(id(one)) for one in tensors]


def has_reentrant_checkpoint(roots: Sequence[torch.Tensor]) -> bool:
    """Whether one made them: torch's, or another library's copy of it."""
    left = [root.grad_fn for root in roots]
    seen: set[object] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if "CheckpointFunction" in node.name():
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False


@contextmanager
def _without_gradients(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within the block they have no earlier gradients, and no hooks run for new ones."""
    gradients = [leaf.grad for leaf in leaves]
    waiting = [leaf._post_accumulate_grad_hooks for leaf in leaves]
    hooks = [(registered, dict(registered)) for registered in waiting if registered is not None]
    for leaf in leaves:
        leaf.grad = None
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        for registered, kept in hooks:
            registered.update(kept)
