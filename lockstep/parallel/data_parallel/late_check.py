"""A check of losses and gradients on a device, of which the host learns a step later.

To check a gradient before its update, the host waits for the device in every step; then the device
waits for the host, which has asked for nothing more. Here the device checks, and leaves out the
update of values that are not finite, and all updates after it: fused optimizers take an argument
for that (``found_inf``, made for the loss scales of ``torch.amp``). The host asks for the next
step, and reads the verdict on the last one then. If that was refused, it makes both steps again,
with the check before the update: so errors, and what counts as finite, are those of that check.

It is for a rank that trains alone, with an optimizer of such a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import optim

from lockstep import accelerators
from lockstep.comm.shared_memory.status_board import look_around_of
from lockstep.parallel.batch_run import Run, StepBatch
from lockstep.parallel.data_parallel.buffers import Kept
from lockstep.parallel.data_parallel.gradient_rules import GradientRules
from lockstep.parallel.updater_interface import Updater


class LateCheck:
    """The device's part.

    Args:
        optimizer: its fused step leaves out the update where values are not finite.
        device: the rank's.
    """

    def __init__(self, optimizer: optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        # NaN, and 1, once a value was not finite.
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._found = torch.zeros((), dtype=torch.float32, device=device)

    @classmethod
    def of(cls, updater: Updater, rules: GradientRules, device: torch.device) -> Self | None:
        """The check of a rank that trains alone; None if it must wait for its device."""
        optimizer = updater.guarded
        return None if optimizer is None or not rules.only_raises else cls(optimizer, device)

    @torch.no_grad()
    def look(self, gradients: Sequence[torch.Tensor], totals: torch.Tensor) -> None:
        """Check a step's gradients, their norms in their own precision, and its losses."""
        found = totals.sum()
        if gradients:
            found = found + torch.stack(torch._foreach_norm(list(gradients))).sum()
        self._sum.add_(found, alpha=0)  # NaN unless it is finite
        torch.ne(self._sum, 0, out=self._found)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Within the block the optimizer's step updates nothing if a value was not finite."""
        own = vars(self.optimizer)
        own.update(found_inf=self._found, grad_scale=None)
        try:
            yield
        finally:
            del own["found_inf"], own["grad_scale"]

    def fetch(self) -> accelerators.Fetch:
        """The verdict so far, on its way to the host."""
        return accelerators.Fetch(self._found)


class LateStep:
    """A step that the host has asked for, and whose verdict it does not know.

    Args:
        batch: of the step.
        run: its shares, with the outputs that ``observe`` is to be called with.
        buffers: the model's, before the step.
        check: that has looked at it.
    """

    def __init__(self, batch: StepBatch, run: Run, buffers: Kept | None, check: LateCheck) -> None:
        self.batch = batch
        self.buffers = buffers
        self._run = run
        self._groups = check.optimizer.param_groups
        self._options = [_options_of(group) for group in self._groups]
        self._fetch = check.fetch()

    def settle(self) -> bool:
        """Wait until the device has decided, and have the outputs observed if the step is valid.

        Returns:
            False if the device has left out the update.
        """
        is_valid = not self._fetch.wait(look_around_of(None))
        if is_valid:
            self._run.end_observing()
        return is_valid

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """Within the block the optimizer has the step's options: a schedule may have changed them.

        After an error it keeps them.
        """
        now = [_options_of(group) for group in self._groups]
        self._set(self._options)
        yield
        self._set(now)

    def _set(self, options: Sequence[Mapping[str, Any]]) -> None:
        for group, own in zip(self._groups, options, strict=True):
            group.update(own)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
