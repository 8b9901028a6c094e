"""Recomputation: activations of some modules are not kept, but computed again in backward.

As ``torch.utils.checkpoint`` does (Chen et al., "Training deep nets with sublinear memory cost",
arXiv 1604.06174), around modules that stay the user's own. Random numbers are drawn again from the
same states, and buffers have the values that they had; after it they are as before.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.data_parallel.buffers import Buffers
from lockstep.parallel.workload import Workload

Surrounding = Callable[[], AbstractContextManager[None]]


class Recomputation:
    """Recomputes modules of a model.

    Args:
        model: the model.
        names: of the modules; none of them is a part of another.
        as_in_pass: what a forward pass runs in, for backward, whose thread may be another.
    """

    def __init__(
        self, model: nn.Module, names: Collection[str], as_in_pass: Surrounding = nullcontext
    ) -> None:
        self._modules = []
        for name in names:
            module = model.get_submodule(name)
            again = partial(_as_before, Buffers(module), as_in_pass)
            self._modules.append((module, partial(_recomputed, again, module.forward)))

    @classmethod
    def of(cls, work: Workload, as_in_pass: Surrounding) -> "Recomputation | None":
        """As a Plan divides the model; None if nothing is recomputed."""
        sharding = work.plan.sharding
        names = () if sharding is None else sharding.recompute
        return cls(work.model, names, as_in_pass) if names else None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, around forward passes for training, the modules are recomputed."""
        own = [(module, vars(module).get("forward")) for module, _ in self._modules]
        for module, forward in self._modules:
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module, before in own:
                del vars(module)["forward"]
                if before is not None:
                    vars(module)["forward"] = before


def _recomputed(
    as_before: Callable[[], Surrounding], forward: Callable[..., Any], *inputs: Any, **named: Any
) -> Any:
    again = as_before()
    return checkpoint(
        partial(forward, **named),  # they may have the names of options of ``checkpoint``
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), again()),
    )


def _as_before(buffers: Buffers, as_in_pass: Surrounding) -> Surrounding:
    """What a module is computed in again: with the buffers that it has now."""
    kept = buffers.keep()

    @contextmanager
    def surrounding() -> Iterator[None]:
        with buffers.as_in(kept), as_in_pass():
            yield

    return surrounding
