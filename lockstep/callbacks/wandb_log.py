"""Tracks training with Weights & Biases."""

import os
from collections.abc import Mapping
from typing import Any

from lockstep.callbacks.scalars import learning_rates, scalars
from lockstep.disk import prepare_folder
from lockstep.errors import OptionError, Problems
from lockstep.extras import import_extra
from lockstep.options import check_choice, check_mapping, check_name, check_path
from lockstep.train.callbacks.callback import ClosingCallback, Logs

_MODES = ("online", "offline", "disabled")


class WandB(ClosingCallback):
    """Makes a Weights & Biases run of every ``fit``: logs and learning rates of each epoch.

    The Plan and the seed are in the run's config. After an error or Ctrl-C the run is marked as
    failed.

    Args:
        project: the project's name; None for W&B's own setting (``WANDB_PROJECT``).
        name: the run's name; None lets W&B choose one.
        mode: "online"; "offline", which only writes files, for ``wandb sync``; or "disabled". None
            for W&B's own setting (``WANDB_MODE``).
        folder: for its files, made if missing; None is the working directory.
        config: to log with the run, such as {"width": 256}.

    Attributes:
        run: W&B's own object during a ``fit``, to log other values; else None.

    Raises:
        OptionError: an option is invalid; when training begins, the folder cannot be written to.
        ExtraError: wandb is not installed: ``pip install ".[wandb]"``.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        mode: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        problems = Problems()
        check_name("project", project, problems, optional=True)
        check_name("name", name, problems, optional=True)
        if mode is not None:
            check_choice("mode", mode, _MODES, problems, fix="Use 'offline'.")
        if folder is not None:
            check_path("folder", folder, problems)
        check_mapping("config", config, problems)
        problems.raise_if_any(OptionError)
        self._wandb = import_extra("wandb", extra="wandb", user="WandB")
        self._options = {"project": project, "name": name, "mode": mode, "dir": folder}
        self._config = dict(config or {})
        self._has_plan = False
        self.run: Any = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self._options["dir"] is not None:
            prepare_folder(self._options["dir"])
        config = {"seed": self.trainer.seed, "precision": self.trainer.precision, **self._config}
        # Other code's active run is not changed.
        self.run = self._wandb.init(**self._options, config=config, reinit="create_new")
        self._has_plan = False

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if not self._has_plan:  # before the first epoch there may be none
            self._has_plan = True
            self.run.config.update({"plan": str(self.trainer.plan)})
        values = {"epoch": epoch, **scalars(logs), **learning_rates(self.trainer)}
        self.run.log(values, step=epoch)

    def _close(self, error: BaseException | None) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish(exit_code=int(error is not None))
