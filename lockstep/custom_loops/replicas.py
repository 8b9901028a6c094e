"""What a loop of one's own asks of the job: who it is, which samples are its, and means."""

import math
from typing import Any

import torch

from lockstep.custom_loops.job import DEFAULT_TIMEOUT_SECONDS, begin, current
from lockstep.data.trees import map_tensors, named_tensors
from lockstep.errors import DataError, OptionError, Problems
from lockstep.options import check_timeout, is_number
from lockstep.plan.engines import backend_for, check_engine
from lockstep.plan.shares import share_bounds
from lockstep.tracebacks import public


@public
def init(*, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, engine: str | None = None) -> None:
    """Meet the other processes that ``lockstep run``, torchrun, srun or ``TF_CONFIG`` has started.

    Each process is a replica. In a script that nobody has launched as one of many there is one. The
    functions here call it with its defaults where the script has not.

    Args:
        timeout_seconds: longest wait for another replica; who does not come is named.
        engine: None has the replicas of a host share one copy of the parameters; ``"gloo"`` gives
            each parameters of its own, and torch.distributed moves gradients and parameters.

    Raises:
        OptionError: an argument that cannot be, or others than in an earlier call.
        WorkerError: another process of this host does not come.
        HostError: another host does not.
    """
    problems = Problems()
    check_engine(problems, engine)
    check_timeout(problems, timeout_seconds)
    problems.raise_if_any(OptionError)
    backend_for(engine, ["cpu:0"])  # raises where it moves no tensors of these
    begin(timeout_seconds, engine)


def rank() -> int:
    """This replica's number, from 0."""
    return current().rank


def num_replicas() -> int:
    """Replicas on all hosts."""
    return current().num_replicas


@public
def share(batch: Any) -> Any:
    """This replica's part of a global batch, possibly empty.

    Args:
        batch: a tensor, or tuples, lists and dicts of tensors, with as many rows each. What is no
            tensor stays as it is.

    Returns:
        The same structure with consecutive rows of each tensor: views. The parts of all replicas
        make up the batch; their sizes differ by at most one, the longer ones first.

    Raises:
        DataError: there is no tensor, or they have different numbers of rows.
    """
    named = list(named_tensors(batch, "batch"))
    lengths = {name: len(tensor) if tensor.dim() else None for name, tensor in named}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise DataError(
            "A batch must hold tensors that have a row for each of its samples.",
            received=", ".join(f"{name} of {_rows(length)}" for name, length in lengths.items())
            or f"no tensor in a {type(batch).__name__}",
            fix="Give the inputs and targets of the global batch, as tensors.",
        )
    job = current()
    length = next(iter(lengths.values()))
    assert length is not None
    start, stop = share_bounds(length, job.num_replicas)[job.rank]
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def _rows(length: int | None) -> str:
    return "no dim" if length is None else f"{length} rows"


@public
def all_mean(value: Any, weight: float = 1.0) -> Any:
    """The weighted mean of all replicas' values; every replica calls it.

    Args:
        value: a number, or a tensor of the same shape everywhere.
        weight: how much this replica's counts, such as its number of samples; with 0 its value may
            be anything, NaN too.

    Returns:
        A number, or a tensor of the value's dtype where that is floating point, else float64. NaN
        where all weights are 0.

    Raises:
        OptionError: a weight that cannot be; on all replicas, values of different shapes.
    """
    check_weight(weight)
    job = current()
    is_tensor = isinstance(value, torch.Tensor)
    tensor = value.detach() if is_tensor else torch.tensor(float(value), dtype=torch.float64)
    flat = tensor.double().cpu().flatten()
    job.check_equal({"the shape of what all_mean is given": str(tuple(tensor.shape))})
    own = torch.cat([torch.tensor([float(weight)], dtype=torch.float64), flat * weight])
    if not weight:
        own.zero_()
    rows = job.tell_row(own)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    mean = total[1:] / total[0] if total[0] else torch.full_like(flat, math.nan)
    if not is_tensor:
        return float(mean)
    return mean.view(tensor.shape).to(tensor.dtype if tensor.is_floating_point() else mean.dtype)


def check_weight(weight: object) -> None:
    """Refuse what is no weight.

    Raises:
        OptionError: it is none.
    """
    if not (is_number(weight) and 0 <= weight < math.inf):
        raise OptionError(
            "`weight` must be a number of samples: at least 0, and finite.",
            received=f"weight={weight!r}",
            fix="Use len(inputs), or the number of tokens that the loss is a mean over.",
        )
