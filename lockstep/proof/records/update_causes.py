"""Causes that lie in an update: options, slots, parameters and buffers."""

from collections.abc import Sequence

from lockstep.proof.recording.record_frames import BUFFER, PARAMETER, SLOT
from lockstep.proof.records.comparison import OPTION, Difference, Pairing, module_of
from lockstep.proof.records.run import Run
from lockstep.proof.records.sample_causes import Cause


def find(pairing: Pairing, first: Difference) -> Cause:
    """The cause of a difference of what an update has made."""
    options = [each for each in pairing.of(OPTION, first.step) if not each.agrees]
    if options:
        return _of_options(options)
    if first.kind == BUFFER:
        return _of_buffer(pairing, first)
    if first.kind == PARAMETER and _never_moved(pairing, first):
        return Cause(
            "never moved",
            f"{first.name} has a gradient, and is after step {first.step} what it was before: no "
            "optimizer has it, or what the optimizer steps on is another tensor.",
        )
    if ranks_disagree(pairing.run, first.kind, first.step):
        return Cause(
            "ranks differ",
            f"The ranks have the same gradients, and different {first.kind}s after step "
            f"{first.step} ({first.name}): something changes them on some ranks only.",
        )
    where = "slots" if first.kind == SLOT else "parameters"
    return Cause(
        "update",
        f"Gradients and options agree, the optimizer's {where} do not: look at the optimizer, and "
        "at what changes parameters outside of it.",
    )


_OPTION_KINDS = {"lr": "learning rate", "weight_decay": "weight decay"}


def _of_options(options: Sequence[Difference]) -> Cause:
    absent = next((each for each in options if " " not in each.name), None)
    if absent is not None:
        return Cause("never moved", f"{absent.name}: {absent.remark}.")
    first = options[0]
    name, _, key = first.name.rpartition(" ")
    same = {each.name for each in options if each.name.endswith(f" {key}")}
    others = "" if len(same) < 2 else f", and {len(same) - 1} more parameters"
    advice = {
        "lr": "Look at the schedule: how often it steps, and whether the number of ranks changes "
        "it.",
        "weight_decay": "Look at how parameters are put into groups: by names that a wrapper has "
        "changed, or by shapes that sharding has.",
    }.get(key, "Look at how the optimizer is made.")
    return Cause(
        _OPTION_KINDS.get(key, "options"),
        f"{key} of {name}{others} is {first.remark} in step {first.step}. {advice}",
    )


def _of_buffer(pairing: Pairing, first: Difference) -> Cause:
    run = pairing.run
    norms = {m.name for m in run.first.header.modules if m.kind.startswith("BatchNorm")}
    if run.world_size > 1 and module_of(first.name) in norms:
        return Cause(
            "batch statistics",
            f"{first.name} holds statistics of each replica's part of the batch, not of all of it: "
            "convert the model with SyncBatchNorm, or do not use these statistics.",
        )
    return Cause("buffers", f"All else agrees: look at what sets {first.name}.")


def _never_moved(pairing: Pairing, first: Difference) -> bool:
    key = first.kind, first.name
    after, before = (pairing.run.values(step).get(key) for step in (first.step, first.step - 1))
    return after is not None and before is not None and after.has_same_bits(before)


def ranks_disagree(run: Run, kind: str, step: int) -> bool:
    """Whether ranks have other values of one tensor of a kind."""
    return any(
        own_kind == kind and value.disagreement() > 1e-6 * max(value.size, 1e-30)
        for (own_kind, _), value in run.values(step).items()
    )
