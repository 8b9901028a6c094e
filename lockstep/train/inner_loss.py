"""The loss that a model computes inside, tried before a pipeline divides the model.

Ranks that have the whole model try it on their own shares (``parallel.model_passes``).
"""

import torch

from lockstep.data.order import kept_streams
from lockstep.data.sources import Batch, Source
from lockstep.parallel.forward import DTYPES, ModelCall
from lockstep.parallel.losses import JointLoss, LossAdapter, ShareLoss
from lockstep.parallel.mean_check import check_mean
from lockstep.parallel.passes import moved
from lockstep.train.assignment import Assignment


def check_inner_loss(
    assignment: Assignment, loss: LossAdapter, source: Source | None, batch_size: int
) -> None:
    """Try the loss on a first batch, where no rank is going to have the whole model.

    Args:
        assignment: the Plan and the model; one that has no values yet is not tried.
        loss: of the model.
        source: samples; None where another host has them.
        batch_size: of the global batch.

    Raises:
        LossError: it is not the weighted mean of the losses of parts of the batch.
    """
    plan, model, device = assignment.plan, assignment.model, assignment.device
    is_due = plan.pipeline is not None and loss.is_inside
    if not is_due or source is None or assignment.blank or plan.num_shares == 1:
        return
    with kept_streams():
        num_samples = min(batch_size, len(source))
        batch = moved(source.read(torch.arange(num_samples), DTYPES[plan.precision]), device)
    call = ModelCall(model, plan, device)

    def loss_of(part: Batch) -> ShareLoss | JointLoss:
        with loss.watching():
            output = call(part.inputs)
        return loss(output, part.targets, part.sample_weight, part.num_samples, part.inputs)

    check_mean(model, loss_of, batch)
