"""A training with its driver: what happens around the steps of a ``fit`` of any front end."""

from collections.abc import Callable

from lockstep.launch.health.failure import ending_with
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.train.callbacks.interrupt import Interrupt, held_interrupts, telling_of_interrupts
from lockstep.train.fault_tolerance.restarting import FollowerDriver
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.resume.fit_checkpoints import FitCheckpoints


def run_training(
    checkpoints: FitCheckpoints,
    task: FitTask,
    loss: LossAdapter | None,
    restarts: int,
    make_driver: Callable[[Interrupt], FollowerDriver],
) -> FollowerDriver:
    """Train; returns the driver, which has the history.

    Args:
        checkpoints: of the training.
        task: the training.
        loss: of the model.
        restarts: allowed after the loss of a process.
        make_driver: makes the driver of host 0, given the state of Ctrl-C.
    """
    state, writer = checkpoints.state, checkpoints.writer
    runner = state.runner
    with (
        checkpoints.copied(task, restarts),
        state.fitting(),
        telling_of_interrupts(lambda: runner.steps_trained, writer),
        held_interrupts() as interrupt,
    ):
        driver = make_driver(interrupt) if runner.is_chief else FollowerDriver(interrupt, writer)
        with driver.raising_failure(checkpoints.state_after_failure):
            with ending_with(driver.close):
                driver.begin_train()
                state.continue_fit(driver, task.start)
                runner.train(task, loss, driver, task.order.batch_size)
            # Schedules, and some optimizers, have stepped on host 0 alone. If Ctrl-C now ends
            # the call on one host, all have received everything.
            runner.job_context.share_values(runner.model, driver.updater)
    return driver
