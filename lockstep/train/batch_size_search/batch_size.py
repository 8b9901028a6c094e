"""``fit(batch_size="auto")``: the best batch size for a training on this machine.

A size that was found before for the same training on the same machine is read from a file
(``batch_size_cache``). Else sizes are tried (``search_algorithm``), each for a few steps in a
process that may die (``train.trials``). The search is shown on screen, and the size is
``trainer.batch_size``.

Not covered: the effect of a larger batch on the model. It makes fewer updates of an epoch, so two
sizes are two trainings. ``learning_rate_rule`` adapts learning rates, on request only.
"""

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from lockstep.cluster.memory_limits import free_memory
from lockstep.data.map_style.samples import array_bytes
from lockstep.data.map_style.sources import Source
from lockstep.errors import DeviceError, OptionError, Problems
from lockstep.formatting import format_bytes, format_count, format_time
from lockstep.launch.workers.pool import own_server
from lockstep.options import check_choice, check_count, is_count
from lockstep.train.batch_size_search.batch_size_cache import (
    SIZES,
    BatchSizeCache,
    key_of,
    recall,
    remember,
)
from lockstep.train.batch_size_search.search_algorithm import (
    LARGEST_PART,
    Doubling,
    Failed,
    Measured,
    Objective,
    TooLarge,
    Trial,
)
from lockstep.train.trainer_protocol import TrainerProtocol
from lockstep.train.trials.trial_process import Trials

if TYPE_CHECKING:
    from lockstep.plan.makers.data_parallel import Maker

# Samples for every replica in the first batch that is tried.
_FIRST_SAMPLES = 8

_SAYS = {"speed": "the fastest per sample", "memory": "the largest that fits the memory"}


@dataclass(frozen=True, kw_only=True)
class BatchSizeSearch:
    """How ``fit`` finds a batch size, in place of a number.

    Sizes are tried by training a few steps with copies of everything, in processes of their own.
    They double until the time per sample has fallen by less than 5% twice in a row; or until the
    memory does not suffice: a size is too large if it needs more than 90% of the free memory, or
    runs out of memory. No size is larger than the data set. The result is stored for this model and
    machine in ``$XDG_CACHE_HOME/lockstep/batch_sizes.json`` (``~/.cache`` by default).

    Args:
        objective: ``"speed"`` is the size with the least time per sample, the smallest of those
            that differ by less than 5%; ``"memory"`` the largest that fits.
        smallest: the size to begin with; None is 8 for every replica, or less if that does not fit.
        largest: the last size to try; None is the whole data set.

    Raises:
        OptionError: an argument is invalid.
    """

    objective: Objective = "speed"
    smallest: int | None = None
    largest: int | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        fix = "Leave it out for the fastest size."
        check_choice("objective", self.objective, get_args(Objective), problems, fix=fix)
        for name in ("smallest", "largest"):
            fix = "Leave it out to have no such bound."
            check_count(name, getattr(self, name), problems, optional=True, fix=fix)
        if is_count(self.smallest) and is_count(self.largest) and self.smallest > self.largest:
            problems.add(
                "`smallest` must not be larger than `largest`.",
                received=f"smallest={self.smallest}, largest={self.largest}",
                fix="Exchange them, or leave one out.",
            )
        problems.raise_if_any(OptionError)


def search_of(batch_size: Any) -> BatchSizeSearch | None:
    """The search that ``batch_size`` asks for; None for a number.

    Raises:
        OptionError: another word, or the class itself.
    """
    if isinstance(batch_size, BatchSizeSearch):
        return batch_size
    if batch_size == "auto" and isinstance(batch_size, str):
        return BatchSizeSearch()
    if isinstance(batch_size, str | type):
        raise OptionError(
            '`batch_size` must be an integer of at least 1, "auto" or a BatchSizeSearch.',
            received=repr(batch_size),
            fix='Use batch_size="auto" to have it found.',
        )
    return None


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training for which a batch size is searched.

    Attributes:
        trainer: the user's.
        loss: the user's.
        maker: of the Plans.
        source: the data.
        validation: validation data, or None.
        options: other options that affect time or memory, with a complete ``repr``.
    """

    trainer: TrainerProtocol
    loss: object
    maker: "Maker"
    source: Source
    validation: Source | None
    options: tuple[object, ...] = ()

    @property
    def num_replicas(self) -> int:
        """The number of replicas that divide a batch."""
        return getattr(self.trainer.strategy, "num_replicas_in_sync", 1)

    def key(self, search: BatchSizeSearch) -> str:
        """The key under which the size is stored."""
        return key_of(
            model=self.trainer.model,
            loss=self.loss,
            optimizer=self.trainer.optimizer,
            source=self.source,
            precision=self.trainer.precision,
            maker=self.maker,
            options=(search, *self.options),
        )


def choose_batch_size(training: Training, options: BatchSizeSearch, console: Console) -> int:
    """The batch size for a training: stored, or found now.

    Args:
        training: the training.
        options: of the search.
        console: shows the search.

    Raises:
        OptionError: sizes that the strategy or the data cannot have.
        DeviceError: the memory does not suffice for the smallest batch.
        ShippingError: a part of the training cannot be sent to another process.
        Exception: raised by the user's own code at the first size that is tried.
    """
    display = _Display(console)
    first, floor = _bounds(training, options)
    key = training.key(options)
    free = free_memory()
    limit = None if free is None else free.num_bytes
    known = recall(key)
    if known is not None and _is_valid(known, len(training.source), limit):
        display.say_recalled(known)
        return known.batch_size
    found = _search(training, options, first, floor, limit, display)
    display.say_found(found, options.objective, is_kept=remember(key, found))
    return found.batch_size


def _bounds(training: Training, options: BatchSizeSearch) -> tuple[int, int]:
    """The size to begin with, and the smallest to go down to if that does not fit.

    Raises:
        OptionError: the data or the strategy cannot have such batches.
    """
    maker, num_samples = training.maker, len(training.source)
    if options.smallest is not None:
        if options.smallest > num_samples:
            raise OptionError(
                "A batch cannot be larger than the data set.",
                received=f"smallest={options.smallest} with {num_samples} samples",
                fix="Leave `smallest` out.",
            )
        maker.check_batch_size(options.smallest)
        return options.smallest, options.smallest
    most = min(options.largest or num_samples, num_samples)
    floor = min(training.num_replicas, most)
    while floor < most and not _takes(maker, floor):
        floor = min(2 * floor, most)
    maker.check_batch_size(floor)
    return min(_FIRST_SAMPLES * floor, most), floor


def _takes(maker: "Maker", batch_size: int) -> bool:
    try:
        maker.check_batch_size(batch_size)
    except OptionError:
        return False
    return True


def _is_valid(known: BatchSizeCache, num_samples: int, limit_bytes: int | None) -> bool:
    """True if a stored size is right for data of this length and the memory that is free now."""
    is_bounded = known.num_samples is not None and known.num_samples < num_samples
    return (
        known.batch_size <= num_samples
        and not is_bounded
        and (limit_bytes is None or known.peak_bytes <= LARGEST_PART * limit_bytes)
    )


def _search(
    training: Training,
    options: BatchSizeSearch,
    first: int,
    floor: int,
    limit_bytes: int | None,
    display: "_Display",
) -> BatchSizeCache:
    num_samples = len(training.source)
    most = min(options.largest or num_samples, num_samples)
    trials = Trials(
        training.trainer,
        training.source,
        loss=training.loss,
        others=0 if training.validation is None else array_bytes(training.validation),
        limit_bytes=limit_bytes,
        timeout_seconds=training.trainer.timeout_seconds,
    )
    with own_server(None), closing(trials):
        search = Doubling(
            objective=options.objective,
            smallest=first,
            floor=floor,
            largest=most,
            limit_bytes=limit_bytes,
            try_size=trials.try_size,
            report=display.show,
        )
        found = search.run()
    if isinstance(found, Failed):
        raise found.error
    if isinstance(found, TooLarge):
        raise _too_large(found)
    return BatchSizeCache(
        batch_size=found.batch_size,
        seconds_per_step=found.seconds_per_step,
        peak_bytes=found.peak_bytes,
        num_samples=most if search.has_reached_largest and most == num_samples else None,
    )


def _too_large(trial: TooLarge) -> DeviceError:
    return DeviceError(
        f"There is not enough memory to train with batches of {trial.batch_size}.",
        received=trial.reason,
        fix="Free memory, raise the limit, or divide the model: lockstep.PipelineStrategy.",
    )


class _Display:
    """Shows a search: a line for every size."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._has_head = False

    def show(self, trial: Trial) -> None:
        """Show a size that was tried."""
        if not self._has_head:
            self._has_head = True
            self._say(f"{'batch_size':>10}  {'a step':>10}  {'samples/s':>10}  {'memory':>10}")
        if not isinstance(trial, Measured):
            self._say(f"{trial.batch_size:>10}  {trial.reason}")
            return
        self._say(
            f"{trial.batch_size:>10}  {format_time(trial.seconds_per_step):>10}  "
            f"{format_count(round(1 / trial.seconds_per_sample)):>10}  "
            f"{format_bytes(trial.peak_bytes):>10}"
        )

    def say_found(self, found: BatchSizeCache, objective: Objective, *, is_kept: bool) -> None:
        """Show the result."""
        kept = f" (remembered in {SIZES.path})" if is_kept else ""
        self._say(f"batch_size {found.batch_size}: {_SAYS[objective]}{kept}")

    def say_recalled(self, known: BatchSizeCache) -> None:
        """Show a stored size."""
        self._say(
            f"batch_size {known.batch_size}: found before for this model and machine "
            f"(remembered in {SIZES.path})"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
