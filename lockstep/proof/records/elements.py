"""The first difference of two full records, element by element."""

from collections.abc import Iterator

import torch

from lockstep.proof.recording.shards import Shard
from lockstep.proof.records.comparison import Difference, Pairing
from lockstep.proof.records.run import Run
from lockstep.proof.records.tolerances import epsilon_of


def describe_elements(pairing: Pairing) -> str:
    """How many elements of the first difference differ, and which most; empty if not recorded."""
    first = pairing.first
    if first is None or not (pairing.run.is_full and pairing.reference.is_full):
        return ""
    rank = first.ranks[0] if first.ranks else min(pairing.run.ranks)
    own, other = _whole(pairing.run, first, rank), _whole(pairing.reference, first, None)
    if own is None or other is None or own.shape != other.shape or not other.numel():
        return ""
    return _describe(own, other)


def _describe(own: torch.Tensor, other: torch.Tensor) -> str:
    differing = own != other
    distances = (own.double() - other.double()).abs()
    index = int(distances.nan_to_num(torch.inf).argmax())
    place = ", ".join(
        str(int(each)) for each in torch.unravel_index(torch.tensor(index), own.shape)
    )
    mine, theirs = own.flatten()[index], other.flatten()[index]
    text = (
        f"{int(differing.sum())} of {other.numel()} elements differ, most at [{place}]: "
        f"{mine.item():.9g} instead of {theirs.item():.9g}"
    )
    epsilon = epsilon_of(str(other.dtype).removeprefix("torch."))
    if epsilon and theirs.item():
        units = distances.flatten()[index].item() / (abs(theirs.item()) * epsilon)
        text += f", {units:.3g} units of rounding"
    return f"{text}."


def _whole(run: Run, first: Difference, rank: int | None) -> torch.Tensor | None:
    """The whole tensor, of shards of all ranks, or of one rank's copy."""
    parts = list(_parts(run, first))
    if not parts:
        return None
    shape, dtype = parts[0][1].shape, parts[0][2].dtype
    result = torch.zeros(shape, dtype=dtype)
    preferred = sorted(parts, key=lambda part: part[0] == rank)  # the last that is set stays
    for _, shard, values in preferred:
        if not shard.num_elements:
            continue
        places = tuple(slice(*each) for each in shard.ranges)
        result[places] = values.reshape(result[places].shape)
    return result


def _parts(run: Run, first: Difference) -> Iterator[tuple[int, Shard, torch.Tensor]]:
    for rank, own in run.ranks.items():
        if first.step in own.steps:
            for entry, values in own.tensors(first.step):
                if (entry.kind, entry.name) == (first.kind, first.name):
                    yield rank, entry.shard, values
