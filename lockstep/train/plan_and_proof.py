"""What a Trainer can say of a training without doing it: its Plan, and the Plan's proof."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from lockstep.errors import OptionError
from lockstep.formatting import listed
from lockstep.launch.health.failure import ending_with
from lockstep.plan.spec import Plan
from lockstep.train.input.data_adapter import DataOptions, adapt_data
from lockstep.train.runtime.runner import Runner
from lockstep.train.torch_front_end import TorchFrontEnd
from lockstep.train.validation.checks import check_counts


def plan_for(runner: Runner, data: Any, batch_size: int | None) -> Plan:
    """The Plan by which ``fit`` would train on this data; see ``Trainer.plan_for``."""
    (batch_size,) = check_counts({"batch_size": batch_size})
    options = DataOptions(name="data", batch_size=batch_size, seed=runner.seed, dims=runner.dims)
    feed = adapt_data(data, options)
    with ending_with(feed.close), torch.inference_mode(False):
        return runner.plan_for(feed)


def verify(
    runner: Runner, front_end: TorchFrontEnd, job: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """Prove that the strategy gives the weights of one device; see ``Trainer.verify``.

    Args:
        runner: of the Trainer.
        front_end: likewise.
        job: the fields of a ``Job`` beside model and optimizer.
        options: for ``lockstep.verify``.
    """
    public = import_module("lockstep")  # at run time, since this floor imports none above it
    if runner.strategy is None:
        raise OptionError(
            "verify compares a strategy with one device.",
            received="strategy=None",
            fix="Give the Trainer one: lockstep.MirroredStrategy(devices=2), for example.",
        )
    front_end.check_trainable()
    if runner.update_config.train_step is None:
        front_end.loss_for("verify")
    runner.initialize()
    whole_job = public.Job(model=runner.model, optimizer=front_end.optimizer, **job)
    report = public.verify(whole_job, runner.strategy, **options)
    left_out = _options_not_proven(runner)
    if not left_out:
        return report
    note = f"Of the Trainer's options these are not part of the proof: {listed(left_out)}."
    return replace(report, notes=(*report.notes, note))


def _options_not_proven(runner: Runner) -> list[str]:
    facts = runner.update_config.facts()
    options = {
        "clip_norm": facts["clip_norm"] is not None,
        "clip_value": facts["clip_value"] is not None,
        "accumulate": facts["accumulate"] != 1,
        "average": facts["average"] is not None,
        "schedule": runner.front_end.schedule is not None,
    }
    return [name for name, is_used in options.items() if is_used]
