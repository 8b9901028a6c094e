"""Recomputation: activations of some modules are not kept, but computed again in backward.

As ``torch.utils.checkpoint`` does (Chen et al., "Training deep nets with sublinear memory cost",
arXiv 1604.06174), around modules that stay the user's own. Random numbers are drawn again from the
same states, and buffers have the values that they had; after it they are as before.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.data_parallel.buffers import Buffers
from lockstep.parallel.sharding.unit_errors import refusing_transforms
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
            again = partial(_recomputed, Buffers(module), as_in_pass, module.forward)
            self._modules.append((module, again))

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
            with refusing_transforms("modules are computed again", "Use recompute=False."):
                yield
        finally:
            for module, before in own:
                del vars(module)["forward"]
                if before is not None:
                    vars(module)["forward"] = before


def _recomputed(
    buffers: Buffers,
    as_in_pass: Surrounding,
    forward: Callable[..., Any],
    *inputs: Any,
    **named: Any,
) -> Any:
    again = _AsBefore(buffers, as_in_pass)
    return checkpoint(
        partial(forward, **named),  # they may have the names of options of ``checkpoint``
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), again),
    )


class _AsBefore(AbstractContextManager[None]):
    """What a module is computed in again, in each backward pass: with the buffers that it has now.

    Args:
        buffers: of the module.
        as_in_pass: what a forward pass runs in.
    """

    def __init__(self, buffers: Buffers, as_in_pass: Surrounding) -> None:
        self._buffers, self._as_in_pass = buffers, as_in_pass
        self._kept = buffers.keep()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._buffers.as_in(self._kept))
            stack.enter_context(self._as_in_pass())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
