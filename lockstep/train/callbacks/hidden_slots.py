"""Within an epoch the optimizer's slots are in the ranks' memory: reading them is an error."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import optim

from lockstep.errors import OptionError


class _Hidden(defaultdict[Any, Any]):
    """The state of an optimizer whose slots are elsewhere."""

    def _refuse(self, *args: Any, **named: Any) -> NoReturn:
        raise OptionError(
            "Within an epoch the optimizer's slots are with the ranks that update by them.",
            received="optimizer.state in a callback before or after a batch",
            fix="Read it in on_epoch_end; or after a batch for which the callback's "
            "takes_state(batch) has returned True.",
        )

    __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = __reduce__ = _refuse
    get = items = keys = values = setdefault = update = pop = clear = copy = _refuse


@contextmanager
def hidden_slots(optimizers: Sequence[optim.Optimizer]) -> Iterator[None]:
    """Within the block reading or setting the optimizers' ``state`` is an error."""
    owners = [vars(one) for one in optimizers if "state" in vars(one)]
    before, hidden = [own["state"] for own in owners], _Hidden()
    for own in owners:
        own["state"] = hidden
    try:
        yield
        for own in owners:
            if own["state"] is not hidden:  # the user has set another
                hidden._refuse()
    finally:
        for own, state in zip(owners, before, strict=True):
            own["state"] = state
