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
from lockstep.plan.spec import Plan
from lockstep.train.batch_size_search.batch_size_cache import key_of
from lockstep.train.batch_size_search.search_algorithm import Measured
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.stream_broadcast import sample_of
from lockstep.train.trainer_protocol import TrainerProtocol
from lockstep.train.trials.trial_process import Trials, TriedStrategy, is_in_trial

TIMES = CacheFile("plan_times.json", dict[str, float], "How long plans take")

# Times that are kept.
_MOST_TIMES = 1000


def plan_trials(
    trainer: TrainerProtocol,
    loss: object,
    feed: DataPipeline,
    epochs: int,
    options: tuple[object, ...],
    announce: Callable[[str], None],
    begun: Plan | None = None,
) -> PlanTrials | None:
    """Trials for a ``fit``; None if another host reads its data, and within a trial.

    Args:
        trainer: of the training; it is copied.
        loss: the user's.
        feed: the data.
        epochs: of the training.
        options: other options that affect time, with a complete ``repr``.
        announce: called with what begins.
        begun: see ``PlanTrials``.
    """
    source, free = sample_of(feed.source), free_memory()
    if source is None or is_in_trial():
        return None
    training = _Training(trainer, loss, source, feed.batch_size, options, announce)
    return PlanTrials(
        times=training.times,
        num_steps=feed.num_steps and feed.num_steps * epochs,
        free_bytes=None if free is None else free.num_bytes,
        begun=begun,
    )


@dataclass(frozen=True)
class _Training:
    trainer: TrainerProtocol
    loss: object
    source: Source
    batch_size: int
    options: tuple[object, ...]
    announce: Callable[[str], None]

    def times(self, plans: Sequence[tuple[str, Maker]]) -> list[float | str]:
        """See ``PlanTrials``."""
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
