"""Tracks training with MLflow.

It uses a client of its own, and does not change MLflow's "active run" and tracking address, which
other code of the process may use.
"""

import time
from collections.abc import Mapping
from typing import Any

from lockstep.callbacks.scalars import learning_rates, scalars
from lockstep.errors import OptionError, Problems
from lockstep.extras import import_extra
from lockstep.options import check_mapping, check_name
from lockstep.train.callbacks.callback import ClosingCallback, Logs


class MLflow(ClosingCallback):
    """Makes an MLflow run of every ``fit``: logs and learning rates of each epoch, and the Plan.

    A run ends as FINISHED; after an error as FAILED, after Ctrl-C as KILLED.

    Args:
        experiment: the experiment's name; it is made if missing.
        run_name: the run's name; None lets MLflow choose one.
        tracking_uri: such as "file:./mlruns" or a server's address; None for MLflow's own setting
            (``MLFLOW_TRACKING_URI``).
        params: to log with the run, such as {"width": 256}.

    Attributes:
        run_id: of the last run; None before the first.

    Raises:
        OptionError: an option is invalid.
        ExtraError: MLflow is not installed: ``pip install ".[mlflow]"``.
    """

    def __init__(
        self,
        experiment: str = "lockstep",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        problems = Problems()
        check_name("experiment", experiment, problems)
        check_name("run_name", run_name, problems, optional=True)
        check_name("tracking_uri", tracking_uri, problems, optional=True)
        check_mapping("params", params, problems)
        problems.raise_if_any(OptionError)
        self._mlflow = import_extra("mlflow", extra="mlflow", user="MLflow")
        self._experiment = experiment
        self._run_name = run_name
        self._uri = tracking_uri
        self._params = dict(params or {})
        self._client: Any = None
        self._is_running = False
        self._has_plan = False
        self.run_id: str | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self._client is None:
            self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        number = (
            self._client.create_experiment(self._experiment)
            if found is None
            else found.experiment_id
        )
        run = self._client.create_run(number, run_name=self._run_name)
        self.run_id = run.info.run_id
        self._is_running, self._has_plan = True, False
        for name, value in self._params.items():
            self._client.log_param(self.run_id, name, value)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        assert self.run_id is not None
        now = time.time_ns() // 1_000_000
        metric = self._mlflow.entities.Metric
        values = {**scalars(logs), **learning_rates(self.trainer)}
        self._client.log_batch(
            self.run_id,
            metrics=[metric(name, value, now, epoch) for name, value in values.items()],
        )
        if not self._has_plan:  # before the first epoch there may be none
            self._has_plan = True
            self._client.log_text(self.run_id, str(self.trainer.plan), "plan.txt")

    def _close(self, error: BaseException | None) -> None:
        if self._is_running:
            is_killed = isinstance(error, KeyboardInterrupt)
            status = "FINISHED" if error is None else "KILLED" if is_killed else "FAILED"
            self._is_running = False
            self._client.set_terminated(self.run_id, status)
