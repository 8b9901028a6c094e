"""A trial of all stages of a pipeline here, before ranks hold them."""

from typing import Any

from lockstep.data.order import holds_streams
from lockstep.parallel.data_parallel.forward import ModelCall
from lockstep.parallel.pipeline.stage_passes import StageTools
from lockstep.train.runtime.assignment import Assignment, compute_settings
from lockstep.train.validation.stage_consistency import Crossing, run_stages


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
