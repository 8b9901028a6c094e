"""What the ranks of a Plan work on: the same on all of them, but for where tensors lie.

Whatever divides it between ranks, lays out what they share, or makes a Worker takes it whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.parallel.data_parallel.gradient_rules import GradientRules
from lockstep.parallel.data_parallel.step_functions import StepFunction
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.parallel.pipeline.partition import Partition
from lockstep.parallel.update import Updater
from lockstep.plan.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and what is done with it.

    Attributes:
        plan: the Plan.
        model: the model; its parameters lie in the store where there are helpers. Those that a rank
            has not may be on the meta device there.
        loss: the loss, adapted; None where only predictions are asked for.
        updater: the optimizer; None where nothing is trained.
        groups: the parameters, by the ranks that have them.
        partitions: of the model in stages, by whether it is in training; none without a pipeline.
        rules: for gradients.
        seed: of all random streams.
        functions: the user's own training steps, in the order of their turns, if there are any.
        dims: where the samples are in what the model takes and returns.
    """

    plan: Plan
    model: nn.Module
    loss: LossAdapter | None
    updater: Updater | None
    groups: tuple[ParameterGroup, ...]
    partitions: Mapping[bool, Partition]
    rules: GradientRules
    seed: int
    functions: tuple[StepFunction, ...] = ()
    dims: BatchDims = SAMPLES_FIRST
