"""Checks on rank 0 that the batches of a call may be divided, before any rank divides one.

Where a Plan is to be chosen, one that divides batches then loses; and no rank of a pipeline has
the whole model. Other ranks check it with their own samples (``parallel.data_parallel``).
"""

from functools import partial

import torch

from lockstep.capture.layers import FrontEndModel
from lockstep.data.batch_dims import BatchDims
from lockstep.data.map_style.sources import Batch
from lockstep.data.order import holds_streams, kept_streams
from lockstep.errors import LockstepError
from lockstep.parallel.data_parallel.forward import DTYPES, ModelCall, modes_of
from lockstep.parallel.data_parallel.staging import moved
from lockstep.parallel.data_parallel.step_functions import StepFunction
from lockstep.parallel.independence.reduction_trial import check_added, check_mean
from lockstep.parallel.independence.sample_independence import check_sample_independence
from lockstep.parallel.independence.split_trial import NUM_INFERRED
from lockstep.parallel.loss.share_losses import JointLoss, LossAdapter, ShareLoss
from lockstep.parallel.storage.meta_init import blank_names
from lockstep.plan.spec import Plan
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.fit.tasks import Task
from lockstep.train.input.stream_broadcast import sample_of
from lockstep.train.optim.update_config import UpdateConfig
from lockstep.train.runtime.front_end import FrontEnd
from lockstep.train.validation.checks import device_of


class DivisionCheck:
    """Tries the model of a call on a first batch, once for all Plans.

    Args:
        front_end: of the model; one without values is not tried.
        update_config: with the user's own training steps.
        dims: of the samples in its data.
        task: the call.
        loss: of the model; None if the call needs none.
        batch_size: of the global batch.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        update_config: UpdateConfig,
        dims: BatchDims,
        task: Task,
        loss: LossAdapter | None,
        batch_size: int,
    ) -> None:
        self._front_end = front_end
        self._model = front_end.model
        self._update_config = update_config
        self._dims = dims
        self._task = task
        self._loss = loss
        self._batch_size = batch_size
        self._is_made = False
        self._error: LockstepError | None = None

    def __call__(self, plan: Plan) -> None:
        """Check a Plan.

        Raises:
            LossError: the loss of a batch is not the weighted mean of the losses of its parts.
            ModelError: the model's output for a sample depends on other samples.
        """
        if plan.num_shares == 1 or self._task.brings_values or blank_names(self._model):
            return
        if not self._is_made:
            self._is_made = True
            try:
                self._try(plan)
            except LockstepError as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def check_stages(self, plan: Plan, num_steps: int, checked: set[int]) -> None:
        """Check a Plan with stages in the first training, and in other calls after a training.

        Args:
            plan: any.
            num_steps: made so far.
            checked: such numbers, of other calls that were checked.
        """
        if plan.pipeline is None:
            return
        if isinstance(self._task, FitTask):
            if not num_steps:
                self(plan)
        elif num_steps not in checked:
            self(plan)
            checked.add(num_steps)

    @holds_streams
    def _try(self, plan: Plan) -> None:
        source, is_fit = sample_of(self._task.source), isinstance(self._task, FitTask)
        if source is None or (not is_fit and isinstance(self._model, FrontEndModel)):
            return  # another host has the data; front ends have tried their models themselves
        device = torch.device(device_of(self._model))
        size = min(self._batch_size if is_fit else NUM_INFERRED, len(source))
        with kept_streams():
            batch = moved(source.read(torch.arange(size), DTYPES[plan.precision]), device)
        call = ModelCall(self._model, plan, device, self._dims)
        if self._loss is not None:
            self._loss.begin(size, plan.num_shares)
        with modes_of(self._model, training=is_fit), call.applied():
            is_linear = self._is_linear(plan, call, batch, is_fit=is_fit)
        if self._loss is not None and is_fit:
            self._loss.is_linear = is_linear

    def _is_linear(self, plan: Plan, call: ModelCall, batch: Batch, *, is_fit: bool) -> bool:
        """See ``check_sample_independence``, which like ``check_mean`` raises errors."""
        model, loss, is_low = self._model, self._loss, call.is_low
        functions: tuple[StepFunction, ...] = ()
        if is_fit:
            functions = self._update_config.functions(self._front_end.optimizer, model, plan)
        for function in functions:
            loss_of = partial(self._loss_by_function, call, function)
            with function.training(model):
                check_mean(model, loss_of, batch, is_low=is_low)
        if functions:
            return True  # unknown: ranks try their own shares
        if loss is not None and loss.is_inside:
            inside = partial(self._loss_inside, call, loss)
            return check_mean(model, inside, batch, is_low=is_low)
        is_linear = check_sample_independence(model, call, batch, is_low=is_low)
        if loss is not None and is_fit:
            check_added(model, loss, call, batch)
        return is_linear

    def _loss_by_function(self, call: ModelCall, function: StepFunction, part: Batch) -> ShareLoss:
        with call.computing():
            return function.loss_of(self._model, part, self._batch_size)

    def _loss_inside(
        self, call: ModelCall, loss: LossAdapter, part: Batch
    ) -> ShareLoss | JointLoss:
        with loss.watching():
            output = call(part.inputs)
        return loss(output, part)
