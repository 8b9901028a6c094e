"""Finds a learning rate: a sweep from a small one to one at which training diverges.

Leslie N. Smith, Cyclical Learning Rates for Training Neural Networks (WACV 2017), section 3.3. The
learning rate grows exponentially, as in fast.ai; the loss is smoothed, and the suggestion is where
it falls fastest over the logarithm of the learning rate.
"""

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.errors import NonFiniteError, OptionError, Problems
from lockstep.extras import import_extra
from lockstep.options import check_count, check_number
from lockstep.train.callbacks.callback import ClosingCallback, Logs
from lockstep.train.trainer_protocol import TrainerProtocol

_FEWEST_POINTS = 3


@dataclass(frozen=True, kw_only=True)
class Point:
    """One step of a sweep.

    Attributes:
        learning_rate: of the step; the largest of the optimizer's groups.
        loss: of the batch.
        smoothed: exponential moving average of the losses so far.
    """

    learning_rate: float
    loss: float
    smoothed: float


class LearningRateFinder(ClosingCallback):
    """Trains some steps with a growing learning rate, then restores everything.

    ``finder.sweep(trainer, data)`` is the short way. As a callback, it makes the first ``fit`` the
    sweep, and does nothing in later ones. Afterwards weights, optimizer, random streams and the
    order of the samples are as before, so that later training has the same bits as without a sweep.
    The optimizer's groups keep the ratios of their learning rates.

    Args:
        start: the first learning rate.
        end: the last.
        num_steps: from the first to the last.
        smoothing: the weight of the past in the smoothed loss, from 0 for none.
        divergence: the sweep ends early when the smoothed loss is so many times its minimum.

    Attributes:
        history: the steps made.

    Raises:
        OptionError: an option is invalid.
    """

    def __init__(
        self,
        *,
        start: float = 1e-7,
        end: float = 10.0,
        num_steps: int = 100,
        smoothing: float = 0.9,
        divergence: float = 4.0,
    ) -> None:
        problems = Problems()
        check_number("start", start, problems, above=0)
        check_number("end", end, problems, above=0)
        check_count("num_steps", num_steps, problems, least=_FEWEST_POINTS)
        check_number("smoothing", smoothing, problems)
        check_number("divergence", divergence, problems, above=1)
        problems.raise_if_any(OptionError)
        if start >= end:
            problems.add(
                "`start` must be less than `end`.", received=(start, end), fix="Swap them."
            )
        if not 0 <= smoothing < 1:
            problems.add(
                "`smoothing` must be from 0 to less than 1.", received=smoothing, fix="Use 0.9."
            )
        problems.raise_if_any(OptionError)
        self._start, self._end, self._num_steps = float(start), float(end), num_steps
        self._smoothing = smoothing
        self._divergence = divergence
        self._ratios: list[float] = []
        self._rewinding = ExitStack()
        self._is_done = False
        self.history: list[Point] = []

    # --- use -------------------------------------------------------------------------------------

    def sweep(self, trainer: TrainerProtocol, data: Any, *, batch_size: int | None = None) -> float:
        """Make the sweep; returns the suggestion. No other callback is called.

        Args:
            trainer: the one that will train.
            data: as for ``fit``.
            batch_size: samples of a global batch; None is the default of ``fit``.

        Raises:
            OptionError: there is nothing to suggest.
        """
        callbacks, trainer.callbacks = trainer.callbacks, [self]
        schedule, trainer.schedule = trainer.schedule, None  # the sweep sets the rate
        self._is_done = False
        size: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
        try:
            trainer.fit(data, epochs=self._num_steps, verbose=0, **size)
        except NonFiniteError:
            pass  # it has diverged within one step; on_train_error has restored everything
        finally:
            trainer.callbacks, trainer.schedule = callbacks, schedule
        return self.suggestion

    @property
    def suggestion(self) -> float:
        """The learning rate at which the smoothed loss falls fastest.

        Raises:
            OptionError: there was no sweep, or one in which the loss never fell.
        """
        losses = np.array([point.smoothed for point in self.history])
        rates = np.array([point.learning_rate for point in self.history])
        slopes = np.gradient(losses, np.log(rates)) if len(losses) >= _FEWEST_POINTS else losses[:0]
        if not slopes.size or slopes.min() >= 0:
            raise OptionError(
                "There is no learning rate to suggest.",
                received=f"a sweep of {len(losses)} steps in which the loss never fell",
                fix="Sweep over more steps, from a smaller `start` to a larger `end`.",
            )
        return float(rates[slopes.argmin()])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot loss over learning rate into a file; its suffix determines the format.

        Raises:
            ExtraError: matplotlib is not installed: ``pip install ".[plot]"``.
        """
        figures = import_extra("matplotlib.figure", extra="plot", user="LearningRateFinder.plot")
        figure = figures.Figure(layout="constrained")
        axes = figure.subplots()
        rates = [point.learning_rate for point in self.history]
        axes.plot(rates, [point.loss for point in self.history], alpha=0.3, label="loss")
        axes.plot(rates, [point.smoothed for point in self.history], label="smoothed")
        axes.axvline(self.suggestion, color="k", ls=":", label=f"suggested: {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        figure.savefig(os.fspath(path))

    # --- the sweep -------------------------------------------------------------------------------

    def acts_in(self, method: str) -> bool:
        return not self._is_done and super().acts_in(method)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self._is_done:
            return
        self.history = []
        self._rewinding.enter_context(self.trainer.rewound())
        rates = [float(group["lr"]) for group in self._groups()]
        if not rates or max(rates) <= 0:
            raise OptionError(
                "The optimizer must have a learning rate, which the sweep replaces.",
                received=rates or "no option 'lr'",
                fix="Give it one above 0; groups keep their ratios.",
            )
        self._ratios = [rate / max(rates) for rate in rates]
        self._set_rate()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        assert logs is not None
        if self._is_done:
            return
        if math.isfinite(logs["loss"]):
            self._add(logs["loss"])
        lowest = min((point.smoothed for point in self.history), default=math.inf)
        has_diverged = not math.isfinite(logs["loss"]) or (
            self.history[-1].smoothed > self._divergence * abs(lowest)
        )
        if has_diverged or len(self.history) == self._num_steps:
            self.trainer.stop_training = True
        else:
            self._set_rate()

    def _add(self, loss: float) -> None:
        """Add a point to the moving average, with correction for its start."""
        past = self._smoothing
        weight = (1 - past) / (1 - past ** (len(self.history) + 1))
        before = self.history[-1].smoothed if self.history else loss
        smoothed = before + weight * (loss - before)
        self.history.append(Point(learning_rate=self._rate(), loss=loss, smoothed=smoothed))

    def _rate(self) -> float:
        share = len(self.history) / (self._num_steps - 1)
        return float(self._start * (self._end / self._start) ** share)

    def _set_rate(self) -> None:
        for group, ratio in zip(self._groups(), self._ratios, strict=True):
            group["lr"] = self._rate() * ratio

    def _groups(self) -> list[dict[str, Any]]:
        groups = [] if self.trainer.optimizer is None else self.trainer.optimizer.param_groups
        return [group for group in groups if "lr" in group]

    def _close(self, error: BaseException | None) -> None:
        self._rewinding.close()
        self._is_done = True
