"""Trials of a whole model before a pipeline divides it: of its loss or outputs, and its stages.

Ranks that have the whole model try it on their own shares instead
(``parallel.data_parallel.model_passes``).
"""

from typing import Any

import torch

from lockstep.data.map_style.sources import Batch, Source
from lockstep.data.order import holds_streams, kept_streams
from lockstep.parallel.data_parallel.forward import DTYPES, ModelCall
from lockstep.parallel.data_parallel.staging import moved
from lockstep.parallel.independence.reduction_test import check_added, check_mean
from lockstep.parallel.independence.sample_independence import check_sample_independence
from lockstep.parallel.loss.share_losses import JointLoss, LossAdapter, ShareLoss
from lockstep.parallel.pipeline.stage_passes import StageTools
from lockstep.train.runtime.assignment import Assignment, compute_settings
from lockstep.train.validation.stage_consistency import Crossing, run_stages


@holds_streams
def check_inner_loss(
    assignment: Assignment, loss: LossAdapter, source: Source | None, batch_size: int
) -> None:
    """Try a model on a first batch, if no rank will have the whole model.

    Args:
        assignment: the Plan and the model; a model without values is not tried.
        loss: of the model.
        source: samples; None if another host has them.
        batch_size: of the global batch.

    Raises:
        LossError: its loss is not the weighted mean of the losses of parts of the batch.
        ModelError: its output for a sample depends on other samples.
    """
    plan, model, device = assignment.plan, assignment.model, assignment.device
    is_due = plan.pipeline is not None
    if not is_due or source is None or assignment.blank or plan.num_shares == 1:
        return
    with kept_streams():
        num_samples = min(batch_size, len(source))
        batch = moved(source.read(torch.arange(num_samples), DTYPES[plan.precision]), device)
    call = ModelCall(model, plan, device, assignment.dims)

    if not loss.is_inside:
        loss.is_linear = check_sample_independence(model, call, batch, is_low=call.is_low)
        loss.begin(batch.num_samples, plan.num_shares)
        check_added(model, loss, call, batch)
        return

    def loss_of(part: Batch) -> ShareLoss | JointLoss:
        with loss.watching():
            output = call(part.inputs)
        return loss(output, part)

    loss.is_linear = check_mean(model, loss_of, batch, is_low=call.is_low)


@holds_streams
def stages_on_samples(assignment: Assignment, samples: Any) -> Crossing | None:
    """Run all stages of a pipeline here on samples, before ranks hold them; None if that fails."""
    plan, model, loss = assignment.plan, assignment.model, assignment.loss
    assert loss is not None
    tools = StageTools(
        model=model,
        partition=assignment.partitions[True],
        call=ModelCall(model, plan, assignment.device, assignment.dims),
        loss=loss,
    )
    with compute_settings(plan):
        return run_stages(tools, samples)
