"""When all ranks of a training wait for rank 0's callbacks, and copies of the training."""

from typing import Literal, NamedTuple

# After which batches callbacks get losses and metrics: "timed" is as often as a screen changes.
ReportTimes = Literal["never", "timed", "each"]


class FitHooks(NamedTuple):
    """What runs on rank 0 between steps and needs the other ranks; on several hosts, host 0's.

    Attributes:
        callbacks: there are callbacks.
        epoch_begin: callbacks may act where an epoch begins.
        step_begin: callbacks may act before every step.
        step_end: callbacks may act after every step.
        slots: callbacks that act after a step read the optimizer's slots.
        state: a callback may take, or a copy is taken of, the training's state after a step.
        full_state: that state includes what each replica has of its own, so that another process
            can resume from it.
        validation: callbacks may act where a validation begins or ends.
        only_parts: no callbacks, but copies that ranks write together, each its parts.
        reports: the steps after which callbacks get losses and metrics so far.
    """

    callbacks: bool = False
    epoch_begin: bool = False
    step_begin: bool = False
    step_end: bool = False
    slots: bool = False
    state: bool = False
    full_state: bool = False
    validation: bool = False
    only_parts: bool = False
    reports: ReportTimes = "never"

    def keeps_states(self, num_ranks: int) -> bool:
        """True if states after steps are kept. A rank alone has copies only if they are asked for.

        Args:
            num_ranks: of the Plan.
        """
        return self.full_state or (self.state and num_ranks > 1)
