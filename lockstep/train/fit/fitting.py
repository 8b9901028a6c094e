"""The course of one ``fit``: check, adapt the data, choose batch size and rates, train.

The Trainer does what comes before and after; the driver does what happens between the steps.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lockstep.data.order import BatchOrder
from lockstep.errors import OptionError
from lockstep.launch.health.failure import ending_with
from lockstep.parallel.loss.share_losses import ONE_LOSS
from lockstep.plan.spec import Plan
from lockstep.train.batch_size_search.batch_size import (
    BatchSizeSearch,
    Training,
    choose_batch_size,
    search_of,
)
from lockstep.train.callbacks.callback import (
    Callback,
    acting,
    stopping,
    told_of_errors,
    traced_steps,
)
from lockstep.train.callbacks.fit_driver import FitDriver
from lockstep.train.callbacks.interrupt import Interrupt
from lockstep.train.checkpointing.checkpoints import CheckpointWriter, check_places
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.checkpointing.partitioned_state import may_divide_copies
from lockstep.train.fault_tolerance.lost_hosts import fit_with_restarts
from lockstep.train.fit.fit_hooks import FitHooks
from lockstep.train.fit.fit_request import FitData, FitRequest
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.fit.snapshots import Snapshots
from lockstep.train.fit.tasks import DataPass, Validation
from lockstep.train.fit.training_run import run_training
from lockstep.train.history import History
from lockstep.train.input.bad_record_filter import skipping
from lockstep.train.input.data_adapter import (
    DataOptions,
    adapt_data,
    adapt_validation_data,
    closing_on_error,
    split_off,
)
from lockstep.train.input.same_data import check_same_data, fingerprint
from lockstep.train.input.stream_broadcast import sample_of
from lockstep.train.logging.metrics import Metrics
from lockstep.train.logging.progress import OutputConsole, ProgressDisplay
from lockstep.train.optim.optimizers import rates_of
from lockstep.train.resume.fit_checkpoints import FitCheckpoints
from lockstep.train.resume.fit_facts import (
    Facts,
    described,
    model_facts,
    optimizer_facts,
    plain,
    schedule_facts,
)
from lockstep.train.resume.part_loading import PartLoading
from lockstep.train.runtime.planning import announce_nothing
from lockstep.train.torch_front_end import TorchFrontEnd
from lockstep.train.trainer_protocol import TrainerProtocol
from lockstep.train.trials.plan_trials import plan_trials
from lockstep.train.validation.checks import (
    check_counts,
    check_on_bad_record,
    check_restarts,
    check_targets,
)


class Fit:
    """One ``fit``.

    Args:
        trainer: whose it is; callbacks get it.
        front_end: its loss, optimizer, schedule and metrics.
        checkpoints: of its training.
        asked: the arguments.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        front_end: TorchFrontEnd,
        checkpoints: FitCheckpoints,
        asked: FitRequest,
    ) -> None:
        self._trainer = trainer
        self._front_end = front_end
        self._checkpoints = checkpoints
        self._state = checkpoints.state
        self._runner = checkpoints.state.runner
        self._job_context = self._runner.job_context
        self._update_config = self._runner.update_config
        self._asked = asked
        self._begun: Plan | None = None  # of the training that is resumed

    def run(self) -> History:
        """Fit; on several hosts, again after one was lost."""
        runner, asked = self._runner, self._asked
        start = runner.epochs_trained, runner.steps_trained

        def fit(memory: MemoryCheckpoints) -> History:
            runner.epochs_trained, runner.steps_trained = start
            return runner.call("fit", lambda: self._fit(memory))

        history, lost = fit_with_restarts(
            fit, asked.restarts, self._job_context, verbose=asked.verbose
        )
        history.restarts += lost
        return history

    def _fit(self, memory: MemoryCheckpoints) -> History:
        asked = self._asked
        self._state.check_not_averaged("fit")
        check_places(asked.checkpoint, asked.record)
        self._shows = bool(asked.verbose) and self._runner.is_chief
        self._console = OutputConsole(quiet=not self._shows)
        with self._checkpoints.kept(
            asked.checkpoint,
            asked.record,
            memory,
            asked.epochs,
            asked.restarts,
            shows=asked.verbose,
        ) as writer:
            return self._fit_on(writer)

    def _fit_on(self, writer: CheckpointWriter | None) -> History:
        """Resume the ``fit`` that was found, if one was."""
        asked, checkpoints = self._asked, self._checkpoints
        search = search_of(asked.batch_size)
        self._check_alone(search)
        fit = self._adapted(search)
        with ending_with(fit.close):
            self._check_targets(fit)
            if search is not None:
                size = None if writer is None or writer.found is None else writer.found.size
                size = size or self._find_batch_size(search, fit)
                fit = replace(fit, feed=fit.feed.resized(size))
            self._settle_batch_size(fit.feed.batch_size)
            if writer is not None:
                is_new = writer.found is None
                self._begun = None if writer.found is None else writer.found.plan
                before = self._runner.epochs_trained, self._runner.steps_trained
                loading = PartLoading(self._runner, fit.feed, fit.loss)
                facts = partial(self._facts, fit)
                ended = checkpoints.resume_found(writer, facts, *before, loading)
                if ended is not None:
                    return ended
                if is_new and asked.restarts:
                    checkpoints.keep_beginning()
            self._begin_schedule(fit)
            self._pass_over(fit)
            history = self._train(fit)
        checkpoints.finish(history)
        return history

    def _adapted(self, search: BatchSizeSearch | None) -> FitData:
        """Check what needs no data, and adapt the data."""
        asked = self._asked
        sizes = {
            "batch_size": None if search else asked.batch_size,
            "steps_per_epoch": asked.steps_per_epoch,
        }
        epochs, size, steps_per_epoch = check_counts(sizes, epochs=asked.epochs)
        check_restarts(asked.restarts)
        check_on_bad_record(asked.on_bad_record)
        has_validation = asked.validation_data is not None or bool(asked.validation_split)
        loss = self._front_end.loss_of_fit(has_validation=has_validation)
        self._front_end.check_trainable()
        options = DataOptions(
            name="data",
            batch_size=size,
            shuffle=asked.shuffle,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            seed=self._runner.seed,
            first_epoch=self._runner.epochs_trained,
            is_read_here=self._runner.is_chief,
            is_summed=asked.checkpoint is not None,
            dims=self._runner.dims,
        )
        feed = adapt_data(asked.data, options)
        with closing_on_error(feed):
            if asked.on_bad_record == "skip":  # before hosts compare samples, which may be bad
                feed = skipping(feed, self._runner.maker(), self._job_context.hosts)
            feed, split = split_off(feed, asked.validation_split, asked.validation_data)
            feed = self._job_context.agreed_feed(feed)
            validation = split or adapt_validation_data(asked.validation_data, options, feed)
            if validation and asked.on_bad_record == "skip":
                validation = skipping(validation, self._runner.maker(), self._job_context.hosts)
        return FitData(loss=loss, options=options, feed=feed, validation=validation)

    # --- checkpoints -----------------------------------------------------------------------------

    def _pass_over(self, fit: FitData) -> None:
        """Read streams again up to the position of the checkpoint.

        Raises:
            DataError: they give other data.
        """
        start = self._state.start_of(fit.feed)
        validation = fit.validation
        others = [] if validation is None else [(validation.source, range(start.epoch))]
        self._state.read_again(start, 0, fit.feed, others)

    def _facts(self, fit: FitData) -> Facts:
        loss, validation = fit.loss, fit.validation
        return {
            "epochs": fit.options.epochs,
            "batch_size": fit.feed.batch_size,
            "steps_per_epoch": fit.options.steps_per_epoch,
            "shuffle": fit.options.shuffle,
            "seed": self._runner.seed,
            "data": fingerprint(fit.feed.source),
            "validation_data": None if validation is None else fingerprint(validation.source),
            "precision": self._runner.precision,
            "batch_dim": str(self._runner.dims),
            **described("loss", None if loss is None else loss.loss),
            "loss_weights": None if loss is None else plain(loss.parts.factors),
            **self._update_config.facts(),
            **optimizer_facts(self._front_end.optimizer, self._runner.model),
            **schedule_facts(self._front_end.schedule),
            **model_facts(self._runner.model),
        }

    # --- checks ----------------------------------------------------------------------------------

    def _check_alone(self, search: BatchSizeSearch | None) -> None:
        """Refuse options that need a single host."""
        hosts = self._job_context.hosts
        if hosts is not None and search is not None:
            raise OptionError(
                "The batch size search runs on one host only.",
                received=f"batch_size={search!r} with {hosts.control_group.num_hosts} hosts",
                fix="Start the script once for that; then pass the number on all hosts.",
            )

    def _check_targets(self, fit: FitData) -> None:
        """Refuse data without targets if they are required."""
        if fit.loss is not None and self._update_config.train_step is None:
            check_targets(sample_of(fit.feed.source), fit.loss, self._front_end.metrics)
        if fit.loss is not None and fit.validation is not None:
            check_targets(sample_of(fit.validation.source), fit.loss, self._front_end.metrics)

    # --- batch size and rates --------------------------------------------------------------------

    def _find_batch_size(self, search: BatchSizeSearch, fit: FitData) -> int:
        """The batch size that the search finds or has cached."""
        training = Training(
            trainer=self._trainer,
            loss=None if fit.loss is None else fit.loss.loss,
            maker=self._runner.maker(),
            source=fit.feed.by_index("data"),
            validation=None if fit.validation is None else sample_of(fit.validation.source),
            options=(self._update_config,),
        )
        return choose_batch_size(training, search, self._console)

    def _settle_batch_size(self, batch_size: int) -> None:
        rule = self._asked.rule
        self._runner.maker().check_batch_size(batch_size)
        self._runner.batch_size = batch_size
        if rule is not None and self._front_end.schedule is not None:
            raise OptionError(
                "A learning rate rule cannot scale the rates of a schedule.",
                received=f"learning_rate_rule={rule.name!r} with a schedule",
                fix="Leave the rule out, and give the schedule the rates you want.",
            )
        if rule is not None:
            said = rule.apply(self._front_end.optimizer, batch_size)
            self._console.print(said, highlight=False, soft_wrap=True)

    def _begin_schedule(self, fit: FitData) -> None:
        self._front_end.is_validated = fit.validation is not None
        if self._front_end.schedule is None:
            return
        names = self._front_end.log_names(has_validation=self._front_end.is_validated)
        start = self._state.start_of(fit.feed)
        num_steps = None
        if fit.feed.num_steps is not None:
            num_epochs = fit.options.epochs - start.epoch
            num_steps = max(num_epochs * fit.feed.num_steps - start.batch, 0)
        self._front_end.schedule.begin(names, num_steps)

    # --- training --------------------------------------------------------------------------------

    def _fit_task(self, fit: FitData) -> FitTask:
        callbacks, options = self._state.own_callbacks, fit.options
        writer = self._checkpoints.writer
        is_kept = writer is not None
        takes_state = is_kept or bool(acting(callbacks, "takes_state"))
        metrics, has_own_step = self._front_end.metrics, self._update_config.train_step is not None
        validation = None
        if fit.validation is not None:
            data = DataPass(source=fit.validation.source, batch_size=fit.feed.batch_size)
            validation = Validation(data=data, metrics=metrics.for_validation)
        task = FitTask(
            source=fit.feed.source,
            order=BatchOrder(
                batch_size=fit.feed.batch_size,
                shuffle=options.shuffle is not False,
                seed=self._runner.seed,
                first_epoch=self._runner.epochs_trained,
                steps_per_epoch=options.steps_per_epoch,
            ),
            validation=validation,
            epochs=options.epochs,
            first_step=self._runner.steps_trained,
            metrics=Metrics(None) if has_own_step else metrics,
            hooks=FitHooks(
                callbacks=bool(callbacks) or is_kept,
                epoch_begin=bool(acting(callbacks, "on_epoch_begin")),
                step_begin=bool(stopping(callbacks, "on_train_batch_begin")),
                step_end=bool(stopping(callbacks, "on_train_batch_end")),
                state=takes_state,
                full_state=takes_state,
                only_parts=self._only_parts(callbacks, writer),
            ),
            traced=traced_steps(callbacks, self._runner.steps_trained),
            counts_skipped=self._update_config.rules.on_nonfinite == "skip",
            loss_parts=ONE_LOSS if fit.loss is None else fit.loss.parts,
            turns=self._update_config.turns,
            start=self._state.start_of(fit.feed),
            folder="" if writer is None or writer.shared is None else str(writer.shared.path),
        )
        return self._agreed(task)

    def _only_parts(self, callbacks: Sequence[Callback], writer: CheckpointWriter | None) -> bool:
        """See ``FitHooks``."""
        if callbacks or self._asked.on_snapshot is not None:
            return False
        is_divided = may_divide_copies(self._runner.maker(), self._job_context.num_hosts)
        found = is_divided and (writer is None or writer.reaches_all)
        if writer is not None:
            writer.only_parts = found
        return found

    def _agreed(self, task: FitTask) -> FitTask:
        """The task, with the same values on all hosts."""
        hosts = self._job_context.hosts
        if hosts is None:
            return task
        schedule = None if self._front_end.schedule is None else self._front_end.schedule.every
        facts = {"the schedule": schedule, "the Trainer's options": self._update_config}
        validation = None if task.validation is None else task.validation.data.source
        check_same_data(hosts, validation, "validation_data")
        return hosts.agree_on_task(task, facts)

    def _train(self, fit: FitData) -> History:
        """Train, with callbacks and progress."""
        task, on_snapshot = self._fit_task(fit), self._asked.on_snapshot
        if on_snapshot is not None:
            task = replace(task, snapshots=Snapshots(getattr(on_snapshot, "look", None)))
        display = None
        if self._shows:
            rates = partial(rates_of, self._front_end.optimizer)
            display = ProgressDisplay(fit.options.epochs, fit.feed.num_steps, rates=rates)
        self._front_end.stop_training = False
        loss, options = fit.loss and fit.loss.loss, (self._update_config,)
        announce = announce_nothing if display is None else display.announce
        trials = plan_trials(
            self._trainer, loss, fit.feed, fit.options.epochs, options, announce, self._begun
        )

        def make_driver(interrupt: Interrupt) -> FitDriver:
            return FitDriver(
                self._trainer,
                self._checkpoints,
                self._state.callbacks,
                interrupt,
                display=display,
                on_snapshot=on_snapshot,
                plan_trials=trials,
            )

        restarts = self._asked.restarts
        with told_of_errors(self._state.own_callbacks):
            driver = run_training(self._checkpoints, task, fit.loss, restarts, make_driver)
        history: History = self._job_context.from_chief(driver.history)
        self._job_context.share_values(self._runner.model)  # of layers that only other hosts have
        driver.end_train()
        self._end_together(task)
        return history

    def _end_together(self, task: FitTask) -> None:
        """Wait until the call has succeeded on all hosts."""
        if self._job_context.hosts is not None:
            self._job_context.hosts.wait()
            if task.hooks.callbacks:  # ``on_train_end`` may have set weights
                self._job_context.share_values(self._runner.model)
