"""Trials of plans for ``AutoStrategy``: how long a step of a training takes by each.

Times are kept in the user's cache folder, by model, batch, plan and machine.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from lockstep.cluster.memory_limits import free_memory
from lockstep.data.map_style.sources import Source
from lockstep.disk import CacheFile
from lockstep.errors import LockstepError
from lockstep.launch.workers.pool import own_server
from lockstep.plan.makers.data_parallel import Maker, PlanTrials
from lockstep.train.batch_size_search.batch_size_cache import key_of
from lockstep.train.batch_size_search.search_algorithm import Measured
from lockstep.train.trainer_protocol import TrainerProtocol
from lockstep.train.trials.trial_process import Trials, TriedStrategy

TIMES = CacheFile("plan_times.json", dict[str, float], "How long plans take")

# Times that are kept.
_MOST_TIMES = 1000


@dataclass(frozen=True, kw_only=True)
class TriedTraining:
    """A training for which plans are tried.

    Attributes:
        trainer: the training, which is copied.
        loss: the user's.
        source: its data.
        batch_size: of the global batch.
        options: other options that affect time, with a complete ``repr``.
        announce: called with what begins.
    """

    trainer: TrainerProtocol
    loss: object
    source: Source
    batch_size: int
    options: tuple[object, ...]
    announce: Callable[[str], None]

    def trials(self, num_steps: int | None) -> PlanTrials:
        """For a maker that chooses.

        Args:
            num_steps: of the training; None if that is not known.
        """
        free = free_memory()
        return PlanTrials(
            times=self._times,
            num_steps=num_steps,
            free_bytes=None if free is None else free.num_bytes,
        )

    def _times(self, plans: Sequence[tuple[str, Maker]]) -> list[float | str]:
        known, new = TIMES.read() or {}, {}
        found: list[float | str] = []
        for name, maker in plans:
            key = self._key(maker)
            if key in known:
                found.append(known[key])
                continue
            self.announce(f"Trying {name}")
            took = self._time(maker)
            if not isinstance(took, str):
                new[key] = took
            found.append(took)
        if new:
            TIMES.write(dict([*known.items(), *new.items()][-_MOST_TIMES:]))
        return found

    def _time(self, maker: Maker) -> float | str:
        """Seconds of a step by its Plan, or why it cannot be trained by."""
        timeout = self.trainer.timeout_seconds
        try:
            trials = Trials(
                self.trainer,
                self.source,
                loss=self.loss,
                others=0,
                limit_bytes=None,
                timeout_seconds=timeout,
            )
            with own_server(None), closing(trials):
                trial = trials.try_size(self.batch_size, TriedStrategy(maker, timeout))
        except LockstepError as error:
            return str(error).partition("\n")[0]
        return trial.seconds_per_step if isinstance(trial, Measured) else trial.reason

    def _key(self, maker: Maker) -> str:
        return key_of(
            model=self.trainer.model,
            loss=self.loss,
            optimizer=self.trainer.optimizer,
            source=self.source,
            precision=self.trainer.precision,
            maker=maker,
            options=("trial", self.batch_size, *self.options),
        )
