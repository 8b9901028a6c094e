"""A callback's own ``evaluate`` or ``predict``: it runs on rank 0, while the other ranks wait."""

from lockstep.errors import OptionError
from lockstep.plan.devices import is_cpu
from lockstep.plan.spec import Plan
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.fit.tasks import Task
from lockstep.train.runtime.job_context import DEFAULT_TIMEOUT_SECONDS
from lockstep.train.runtime.session import Session


def nested_session(task: Task, plan: Plan | None) -> Session:
    """The session of a call within a training.

    Args:
        task: of the call.
        plan: of the training.

    Raises:
        OptionError: a ``fit`` within a ``fit``, or rank 0 does not hold the whole model.
    """
    if plan is not None and plan.pipeline is not None and not is_cpu(plan.devices):
        raise OptionError(
            "During pipeline training on accelerators, rank 0 does not hold the whole model.",
            received="evaluate or predict in a callback",
            fix="Pass validation_data to fit, or call it after fit.",
        )
    if isinstance(task, FitTask):
        raise OptionError(
            "A callback cannot train the model that is being trained.",
            received="fit within fit",
            fix="Call evaluate or predict, or train another model with another Trainer.",
        )
    return Session(DEFAULT_TIMEOUT_SECONDS)
