"""The runner: runs tasks of one model on all ranks, one after the other.

It has the model's Plan, the processes and hosts that it runs on, and the number of steps made. It
is a part of the Trainers of every front end (``train.runtime.front_end``).
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn

from lockstep import accelerators
from lockstep.capture.layers import capture_layers
from lockstep.capture.sparse import sparse_buffers_aside
from lockstep.cluster.devices import discover
from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.errors import OptionError, WorkerError
from lockstep.events import LOGGER
from lockstep.launch.health.failure import ending_with, noting_on
from lockstep.parallel.groups import parameter_groups
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.parallel.loss.whole_batch import whole_batch_note
from lockstep.parallel.settings import (
    TorchSettings,
    check_deterministic,
    deterministic_kernels,
    modules_of_kernels,
)
from lockstep.parallel.storage.meta_init import blank_names, clear_meta, initialize
from lockstep.plan.devices import is_cpu
from lockstep.plan.makers.data_parallel import Maker, SingleDevice
from lockstep.plan.spec import Plan
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.callbacks.model_changes import ModelLayout
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.run_state import set_state, state_of
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.fit.fit_task import FitResult, FitTask
from lockstep.train.fit.pipeline_trials import stages_on_samples
from lockstep.train.fit.tasks import Task, evaluated_samples
from lockstep.train.input.data_adapter import DEFAULT_BATCH_SIZE, DataPipeline
from lockstep.train.input.stream_broadcast import sample_of
from lockstep.train.optim.error_feedback import ErrorFeedback
from lockstep.train.optim.optimizer_checks import check_divisible, check_offload
from lockstep.train.optim.update_config import AnyUpdater, UpdateConfig
from lockstep.train.runtime.assignment import Assignment, is_made_in_parts
from lockstep.train.runtime.call_cache import CallCache
from lockstep.train.runtime.front_end import FrontEnd
from lockstep.train.runtime.job_context import JobContext, StrategyLike
from lockstep.train.runtime.nested_call import nested_session
from lockstep.train.runtime.planning import Partitions, Planning
from lockstep.train.runtime.session import Session
from lockstep.train.validation.checks import check_backend, device_of, place_model
from lockstep.train.validation.division_check import DivisionCheck
from lockstep.train.validation.local_update_checks import check_local_sgd, check_parameter_server
from lockstep.train.validation.rank_consistency import proof_key, samples_of

_T = TypeVar("_T")


class Runner:
    """Runs tasks of a model.

    Args:
        front_end: the library's part; its model is trained in place.
        meta_model: the model, or one of its shape on the meta device.
        job_context: the processes that make calls together.
        strategy: where and how to train; None is one device.
        update_config: what training does besides the optimizer.
        precision: see ``Trainer``.
        seed: of all random numbers in training.
        dims: the dims of the samples in the data, and in the model's inputs and outputs.
        deterministic: use only kernels that give the same bits in every run.

    Attributes:
        batch_size: of the last training; None before.
        epochs_trained: so far.
        steps_trained: likewise.
        last_plan: the Plan of the last call; None before.
        residuals: of compressed messages.
        session: has the helper processes and the parameter store.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        *,
        meta_model: nn.Module,
        job_context: JobContext,
        strategy: StrategyLike | None,
        update_config: UpdateConfig,
        precision: str,
        seed: int,
        dims: BatchDims = SAMPLES_FIRST,
        deterministic: bool = False,
    ) -> None:
        self.front_end = front_end
        self.strategy = strategy
        self.precision = precision
        self.seed = seed
        self.deterministic = deterministic
        self.batch_size: int | None = None
        self.update_config = update_config
        self.epochs_trained = 0
        self.steps_trained = 0
        self.last_plan: Plan | None = None
        self.residuals = ErrorFeedback()
        self.dims = dims
        self._planning = Planning(meta_model, dims, partial(getattr, front_end, "optimizer"))
        self._begin_session(job_context)

    def _begin_session(self, job_context: JobContext) -> None:
        self.job_context = job_context
        self._calls = CallCache()
        self._proven: object = None  # of the last rank consistency check that passed
        self._checked: set[int] = set()  # numbers of steps after which stages were checked
        self.session = Session(self.timeout_seconds)
        self._finalizer = weakref.finalize(self, self.session.close)

    def __getstate__(self) -> dict[str, Any]:
        """The state that a runner in another process needs."""
        own = ("job_context", "session", "_calls", "_finalizer", "_proven", "_checked")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_session(JobContext(self.strategy))

    @property
    def model(self) -> nn.Module:
        """The front end's model, which is trained in place."""
        return self.front_end.model

    @property
    def timeout_seconds(self) -> float:
        """Longest wait for a helper, by the strategy."""
        return self.job_context.timeout_seconds

    @property
    def plan(self) -> Plan:
        """The Plan of the last call, or the one a ``fit`` with the default batch would have.

        Raises:
            OptionError: before the first call, if the Plan depends on the cost of layers.
        """
        if self.last_plan is not None:
            return self.last_plan
        maker, cluster = self.maker(), discover()
        if maker.sample_size(cluster, DEFAULT_BATCH_SIZE) is not None:
            raise OptionError(
                "The Plan depends on the costs of the model's layers on your data.",
                received="`plan` before fit, evaluate or predict",
                fix="Call one of them first, or strategy.plan(model, batch_size=..., "
                "sample=inputs).",
            )
        return maker(capture_layers(self.model), cluster, DEFAULT_BATCH_SIZE)

    def plan_for(self, feed: DataPipeline) -> Plan:
        """The Plan for this host by which it would train on this data."""
        maker = self.maker()
        maker.check_batch_size(feed.batch_size)
        source = sample_of(feed.source)
        plan, _ = self._planning.plan(maker, self.precision, source, feed.batch_size)
        return self.update_config.plan(plan)

    def planned(self) -> dict[str, Any]:
        """The last Plan, and the plans among which it was chosen, for a record."""
        plan, ranking = self.last_plan, self._planning.ranking()
        return {"plan": plan and msgspec.to_builtins(plan), "ranking": ranking}

    def close(self) -> None:
        """End the helper processes now instead of with the trainer."""
        self._calls = CallCache()
        self.session.close()

    # --- state ---------------------------------------------------------------------------------

    def state(self) -> TrainingState:
        """The current state of this run; no copy."""
        self.initialize()
        return self.forms()

    def forms(self) -> TrainingState:
        """As ``state``; parameters of a model that a function has made may have no values yet."""
        scale = self.update_config.rules.loss_scale
        return replace(
            state_of(self.model, self._own_updater()),
            loss_scale=None if scale is None else dict(vars(scale)),
            random={"seed": self.seed},
            position={"epochs": self.epochs_trained, "steps": self.steps_trained},
            residuals=self.residuals.state(self.job_context.host),
        )

    def set_state(self, state: TrainingState) -> None:
        """Continue from a state that fits; the state is not changed."""
        if not all(one.is_meta for one in state.parameters.values()):  # else ranks will set them
            self.initialize()
        set_state(self.model, self._own_updater(), state)
        if state.loss_scale is not None:
            vars(self.update_config.rules.loss_scale).update(state.loss_scale)
        self.seed = state.random["seed"]
        job_context = self.job_context
        self.residuals.load(state.residuals, job_context.host, job_context.num_hosts)
        self.epochs_trained = state.position["epochs"]
        self.steps_trained = state.position["steps"]

    def _own_updater(self) -> Any:
        """The updater with the optimizer's state; None without an optimizer."""
        return None if self.front_end.optimizer is None else self.make_updater()

    def make_updater(self) -> Any:
        """An updater of the front end's optimizer."""
        return self.front_end.make_updater(self.maker())

    # --- with all processes --------------------------------------------------------------------

    def call(self, name: str, make: Callable[[], _T]) -> _T:
        """Make a call together with all processes; returns its result on all of them."""
        with self.job_context.together(name), accelerators.kept_device():
            return self.shared(make)

    def shared(self, make: Callable[[], _T]) -> _T:
        """The result of the process that leads a host, on those that follow it, too."""
        if self.job_context.follower is not None:
            followed: _T = self.job_context.follower.serve(self.model)
            return followed
        hosts = self.job_context.hosts
        if hosts is None or not hosts.has_followers:
            return make()
        try:
            result = make()
        except BaseException as error:
            with noting_on(error):
                self.session.desert(hosts, error)
            raise
        self.session.dismiss(hosts, result, self.model)
        return result

    @property
    def is_chief(self) -> bool:
        """True if this process has rank 0, and so callbacks, progress, files and streams."""
        return self.job_context.is_chief

    # --- tasks ---------------------------------------------------------------------------------

    def train(
        self,
        task: FitTask,
        loss: LossAdapter | None,
        driver: TaskDriver,
        batch_size: int,
    ) -> None:
        """Run the task; restart it when a callback has changed what the ranks were sent."""
        resume: FitPosition | None = task.start
        first_epoch, first_step = self.epochs_trained, self.steps_trained
        self.epochs_trained += task.start.epoch
        while resume is not None and resume.epoch < task.epochs:
            task = replace(task, start=resume, first_step=first_step)
            driver.updater = updater = self.make_updater()
            hosts = self.job_context.hosts if task.hooks.callbacks else None
            before = (
                None if hosts is None else ModelLayout(self.model, self.front_end.torch_optimizers)
            )
            try:
                result: FitResult = self.run(task, loss, updater, driver, batch_size)
            except WorkerError as error:
                resume = driver.resume_after(error)
                if resume is None:
                    raise
                if resume.served is not None:  # the weights have all but the batches under way
                    self.steps_trained = resume.served.table.oldest
                first_step, self.epochs_trained = self.steps_trained, first_epoch + resume.epoch
                continue
            if result.resume is None:  # else it has them already, with the callback's changes
                driver.take_slots(self.job_context.from_chief(result.slots))
            elif hosts is not None and before is not None:
                hosts.share_changes(self.model, self.front_end.torch_optimizers, before)
            first_step += result.num_steps
            self.steps_trained = first_step
            self.epochs_trained = first_epoch + max(result.num_epochs, resume.epoch)
            resume = result.resume

    def run(
        self,
        task: Task,
        loss: LossAdapter | None,
        updater: AnyUpdater | None,
        driver: TaskDriver,
        batch_size: int,
    ) -> Any:
        """Run a task on all ranks; returns its result."""
        kernels = deterministic_kernels() if self.deterministic else nullcontext()
        running = self.front_end.running(loss)
        check = DivisionCheck(self.front_end, self.update_config, self.dims, task, loss, batch_size)
        with running as fingerprint, sparse_buffers_aside(self.model), kernels:
            if self.job_context.is_rank_zero_only:
                session = nested_session(task, self.last_plan)
                planned = self._plan_for_one(batch_size)
            else:
                planned = self._plan_for_all(task, batch_size, driver, check)
                session = self.session
                session.preload = self.front_end.preload + modules_of_kernels()
            assignment = self._assignment(task, loss, updater, *planned)
            if self.deterministic:
                check_deterministic(assignment.device)
            proof = self._prepare_proof(assignment, session, driver, fingerprint)
            check.check_stages(assignment.plan, self.steps_trained, self._checked)
            with (
                ending_with(partial(self._place_model, assignment.plan)),
                self.job_context.at_work() as hosts,
            ):
                result = session.run(assignment, driver, hosts, self._calls, fingerprint)
            self._proven = proof or self._proven
            if (plan := self.last_plan) and loss is not None and loss.uses_whole_batch:
                notes = dict.fromkeys((*plan.notes, whole_batch_note(loss)))
                self.last_plan = msgspec.structs.replace(plan, notes=tuple(notes))
            return result

    def _prepare_proof(
        self, assignment: Assignment, session: Session, driver: TaskDriver, fingerprint: object
    ) -> object:
        """Have the ranks of a training check that they compute the same, unless they have.

        Returns the key of that check, to compare in the next training; None without a check.
        """
        task, plan = assignment.task, assignment.plan
        in_stages = plan.pipeline is not None
        is_whole = is_cpu(plan.devices) and not assignment.blank
        is_left_out = plan.num_ranks == 1 or (in_stages and not is_whole)
        if not (isinstance(task, FitTask) and self.front_end.proves) or is_left_out:
            return None
        parts = (self.model, assignment.loss and assignment.loss.loss, assignment.functions)
        proof = session.num_ended, plan, proof_key(fingerprint, parts, self.model)
        # Each host remembers its own checks, and all must agree.
        task.proves = plan.num_hosts > 1 or self._proven != proof
        if task.proves:
            driver.samples = samples_of(sample_of(task.source), self.precision)
        if task.proves and in_stages and driver.samples is not None:
            is_first = self.job_context.host == 0
            driver.samples = stages_on_samples(assignment, driver.samples) if is_first else None
        return proof

    def _plan_for_all(
        self, task: Task, batch_size: int, driver: TaskDriver, divides: DivisionCheck
    ) -> tuple[Plan, Partitions]:
        maker = self.maker()

        def check(plan: Plan) -> Plan:
            self.front_end.check_plan(plan := self.update_config.plan(plan))
            divides(plan)
            return plan

        with self.update_config.planning():
            plan, partitions = self._planning.plan(
                maker,
                self.precision,
                sample_of(task.source),
                batch_size,
                self.job_context.cluster,
                lambda plan: self.job_context.agreed_plan(plan, maker),
                driver.announce,
                check,
                trials=driver.plan_trials,
                for_training=isinstance(task, FitTask),
                evaluated=evaluated_samples(task),
            )
        plan = self.update_config.plan(plan)
        before, self.last_plan = self.last_plan, plan
        if self.is_chief and plan != before:
            where = f"{plan.strategy} on {', '.join(plan.devices)}"
            LOGGER.info("plan: %s, %s, num_shares=%d", where, plan.precision, plan.num_shares)
        return plan, partitions

    def _plan_for_one(self, batch_size: int) -> tuple[Plan, Partitions]:
        return self._maker_for_one()(capture_layers(self.model), discover(), batch_size), {}

    def _place_model(self, plan: Plan) -> torch.device:
        """See ``place_model``; a call within a training leaves slots where that has them."""
        is_nested = self.job_context.is_rank_zero_only
        return place_model(self.model, () if is_nested else self.front_end.torch_optimizers, plan)

    def _assignment(
        self,
        task: Task,
        loss: LossAdapter | None,
        updater: AnyUpdater | None,
        plan: Plan,
        partitions: Partitions,
    ) -> Assignment:
        """Everything that ranks need for the task."""
        check_backend(plan)
        self.front_end.check_plan(plan)
        device = self._place_model(plan)
        self.front_end.place(device)
        if updater is not None:
            check_divisible(self.model, self.front_end.optimizer, plan, is_known=updater.is_known)
            check_offload(updater, self.front_end.optimizer, plan)
            check_local_sgd(plan, updater, self.update_config.averages, self.precision)
            check_parameter_server(plan, self.model, updater, self.precision)
        groups = parameter_groups(plan, self.model, list(partitions.values()))
        assignment = Assignment(
            plan=plan,
            model=self.model,
            loss=loss,
            updater=updater,
            task=task,
            seed=self.seed,
            device=device,
            settings=TorchSettings.current(),
            partitions=partitions,
            groups=groups,
            blank=frozenset(),
            rules=self.update_config.rules,
            functions=()
            if updater is None
            else self.update_config.functions(self.front_end.optimizer, self.model, plan),
            dims=self.dims,
            residuals=None if updater is None else self.residuals.fitted(plan, self.model, groups),
        )
        if is_made_in_parts(assignment) or task.brings_values:
            return replace(assignment, blank=blank_names(self.model))
        self.initialize()
        return assignment

    def initialize(self) -> None:
        """Initialize the parameters of a model made by a function, if they have no values.

        If a Plan with stages comes first, its ranks do this, each for its own part.
        """
        blank = blank_names(self.model)
        if blank:
            initialize(self.model, blank, self.seed)
            clear_meta(self.model)

    def _maker_for_one(self) -> Maker:
        """The maker of Plans for one device: the model's."""
        return SingleDevice(device=device_of(self.model), precision=self.precision)

    def maker(self) -> Maker:
        """The maker of the Plans of calls."""
        maker = self._maker_for_one()
        if self.strategy is not None and not self.front_end.is_on_one_device:
            maker = self.strategy.maker(self.precision)
        return self.update_config.maker(maker)
