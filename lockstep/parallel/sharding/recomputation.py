"""Recomputation: activations of some modules are not kept, but computed again in backward.

As ``torch.utils.checkpoint`` does (Chen et al., "Training deep nets with sublinear memory cost",
arXiv 1604.06174), around modules that stay the user's own. Random numbers are drawn again from the
same states, and buffers have the values that they had; after it they are as before.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.data_parallel.buffers import Buffers
from lockstep.plan.sharding import Sharding


class Recomputation:
    """Recomputes modules of a model.

    Args:
        model: the model.
        names: of the modules; none of them is a part of another.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._modules = []
        for name in names:
            module = model.get_submodule(name)
            self._modules.append((module, partial(_recomputed, Buffers(module), module.forward)))

    @classmethod
    def of(cls, model: nn.Module, sharding: Sharding | None) -> "Recomputation | None":
        """As a Plan divides the model; None if nothing is recomputed."""
        return cls(model, sharding.recompute) if sharding and sharding.recompute else None

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


def _recomputed(buffers: Buffers, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    kept = buffers.keep()
    return checkpoint(
        partial(forward, **named),  # they may have the names of options of ``checkpoint``
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), buffers.as_in(kept)),
    )
