"""The strategy that chooses a strategy."""

from lockstep.errors import OptionError, Problems
from lockstep.formatting import parse_bytes
from lockstep.options import check_choice, check_count, check_timeout
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.search.automatic import Automatic
from lockstep.plan.search.ranking import OBJECTIVES
from lockstep.strategies.base import Strategy
from lockstep.strategies.pipeline import check_counts
from lockstep.tracebacks import public_methods


@public_methods
class AutoStrategy(Strategy):
    """Chooses how to train: one device, replicas, a pipeline, or replicas of one.

    Replicas may divide parameters, gradients and the optimizer's slots, and ranks may divide layers
    inside.

    At the first call the model's layers are timed on some of its data, which takes seconds and is
    remembered for this model and machine. Of all plans the one that is predicted to cost least is
    chosen, and kept; ``print(trainer.plan)`` says why the next ones lose. If predictions are close,
    a long training begins with trials: by the best plan of each kind copies are trained for a few
    steps, and the fastest is chosen.

    Args:
        objective: ``"time"`` of a step, or ``"memory"``: of the device that needs most.
        memory: of a device, in bytes or such as ``"24GiB"``; None is what it has. Plans may fill
            90 % of it.
        devices: how many to use at most; None is all accelerators, else all usable cores.
        trials: plans that ``Trainer.fit`` tries at most; None is 3 if the training is expected to
            take more than a minute, else 0. A trial takes some seconds; times are remembered.
        timeout_seconds: longest wait for a device; a longer one is an error.

    Raises:
        OptionError: an invalid argument.
    """

    def __init__(
        self,
        objective: str = "time",
        memory: int | str | None = None,
        *,
        devices: int | None = None,
        trials: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
        fix = "Use 'time' or 'memory'."
        check_choice("objective", objective, OBJECTIVES, problems, fix=fix)
        size = parse_bytes(memory) if isinstance(memory, str) else memory
        if memory is not None and (type(size) is not int or size < 1):
            problems.add(
                "`memory` must be a size.",
                received=f"memory={memory!r}",
                fix="Use memory='24GiB', or a number of bytes.",
            )
        check_counts(problems, devices=devices)
        fix = "Leave it out, or use 0 to choose by predictions alone."
        check_count("trials", trials, problems, optional=True, least=0, fix=fix)
        check_timeout(problems, timeout_seconds)
        problems.raise_if_any(OptionError)
        self._memory_bytes = size
        self.objective = objective
        self.devices = devices
        self.trials = trials
        self.timeout_seconds = timeout_seconds

    def maker(self, precision: str = "fp32") -> Maker:
        return Automatic(
            objective=self.objective,
            memory_bytes=self._memory_bytes,
            num_devices=self.devices,
            precision=precision,
            num_trials=self.trials,
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """Not known before a Plan is chosen: batches are global, so 1."""
        return 1
