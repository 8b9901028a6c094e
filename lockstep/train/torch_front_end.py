"""The front end of PyTorch models: loss, optimizer, schedule and metrics of a Trainer."""

from collections.abc import Sequence
from typing import Any

from torch import nn, optim

from lockstep.errors import ModelError, OptionError
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.plan.makers.data_parallel import Maker
from lockstep.train.logging.metrics import Metrics
from lockstep.train.optim.learning_rates import RunningSchedule
from lockstep.train.optim.optimizers import each_optimizer
from lockstep.train.optim.update_config import AnyUpdater, UpdateConfig
from lockstep.train.preloadable_modules import known_modules
from lockstep.train.resume.differences import Difference
from lockstep.train.resume.fit_facts import Facts
from lockstep.train.resume.fit_record import FitState
from lockstep.train.resume.new_options import set_new_options
from lockstep.train.runtime.front_end import FrontEnd
from lockstep.train.validation.checks import check_names, log_names


class TorchFrontEnd(FrontEnd):
    """See ``Trainer`` for the arguments.

    Raises:
        OptionError: a metric has the name of another value in the logs.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: LossAdapter | None,
        optimizer: Any,
        schedule: RunningSchedule | None,
        metrics: Metrics,
        update_config: UpdateConfig,
    ) -> None:
        check_names(loss, schedule, metrics)
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.schedule = schedule
        self.metrics = metrics
        self.stop_training = False
        self.is_validated = True
        self._update_config = update_config

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "schedule": None}

    @property
    def preload(self) -> tuple[str, ...]:
        loss = None if self.loss is None else self.loss.loss
        return known_modules([*self.model.modules(), loss, *self.metrics.by_name.values()])

    @property
    def torch_optimizers(self) -> Sequence[optim.Optimizer]:
        return each_optimizer(self.optimizer)

    def make_updater(self, maker: Maker) -> AnyUpdater:
        changes_by_step = self.schedule is not None and self.schedule.every == "step"
        return self._update_config.updater(
            self.optimizer,
            self.model,
            changes_by_step=changes_by_step,
            has_outer=maker.traits.outer is not None,
        )

    def set_new_options(
        self, begun: Any, found: FitState, asked: Facts, taken: Sequence[Difference]
    ) -> None:
        set_new_options(self.optimizer, self.schedule, begun, found, asked, taken)

    def log_names(self, *, has_validation: bool) -> list[str]:
        """Names of the losses and metrics of an epoch."""
        return log_names(
            self.loss, self.metrics, self._update_config, has_validation=has_validation
        )

    def all_log_names(self) -> list[str]:
        """Names of all values that an epoch of the present ``fit`` may have in the history."""
        rates = [] if self.schedule is None else ["lr"]
        is_skipping = self._update_config.rules.on_nonfinite == "skip"
        skipped = ["skipped_steps"] if is_skipping else []
        return [*self.log_names(has_validation=self.is_validated), *rates, *skipped]

    def loss_of_fit(self, *, has_validation: bool) -> LossAdapter | None:
        """The loss of a ``fit``; None if the user's own step computes it."""
        has_own_step = self._update_config.train_step is not None
        return self.loss if has_own_step and not has_validation else self.loss_for("fit")

    def loss_for(self, method: str) -> LossAdapter:
        """The loss.

        Raises:
            OptionError: there is none.
        """
        if self.loss is None:
            raise OptionError(
                f"{method} needs a loss.",
                received="loss=None",
                fix="Give the Trainer one: torch.nn.CrossEntropyLoss(), for example; or "
                "lockstep.OwnLoss(), if the model returns its loss.",
            )
        return self.loss

    def check_trainable(self) -> None:
        """Check that there are an optimizer and parameters to train.

        Raises:
            OptionError: there is no optimizer.
            ModelError: there is no parameter.
        """
        if self.optimizer is None:
            raise OptionError(
                "fit needs an optimizer.",
                received="optimizer=None",
                fix="Give the Trainer one: functools.partial(torch.optim.Adam, lr=1e-3).",
            )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ModelError(
                "The model must have a trainable parameter.",
                received=f"a {type(self.model).__name__} without any",
                fix="Unfreeze a part of it, or use evaluate or predict.",
            )
