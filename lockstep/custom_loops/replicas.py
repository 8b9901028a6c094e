"""Public functions for custom loops: this replica's rank, its samples, and means over replicas."""

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
    """Connect to the processes that ``lockstep run``, torchrun, srun or ``TF_CONFIG`` started.

    Each process is a replica; a script without a launcher is the only one. The other functions here
    call it with its defaults if the script has not.

    Args:
        timeout_seconds: longest wait for another replica; errors name the missing ones.
        engine: None: the replicas of a host share one copy of the parameters; ``"gloo"``: each has
            its own parameters, and torch.distributed moves gradients and parameters.

    Raises:
        OptionError: an invalid argument, or other arguments than in an earlier call.
        WorkerError: another process of this host does not connect.
        HostError: another host does not connect.
    """
    problems = Problems()
    check_engine(problems, engine)
    check_timeout(problems, timeout_seconds)
    problems.raise_if_any(OptionError)
    backend_for(engine, ["cpu:0"])  # raises if it does not support CPU tensors
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
        batch: a tensor, or tuples, lists and dicts of tensors with equally many rows. Other values
            are returned unchanged.

    Returns:
        The same structure with consecutive rows of each tensor: views. The parts of all replicas
        make up the batch; their sizes differ by at most one, the longer ones first.

    Raises:
        DataError: there is no tensor, or tensors have different numbers of rows.
    """
    named = list(named_tensors(batch, "batch"))
    lengths = {name: len(tensor) if tensor.dim() else None for name, tensor in named}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise DataError(
            "A batch must consist of tensors with a row for each sample.",
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
        weight: of this replica's value, such as its number of samples; with 0 its value may be
            anything, even NaN.

    Returns:
        A number, or a tensor of the value's dtype if that is floating point, else float64. NaN if
        all weights are 0.

    Raises:
        OptionError: an invalid weight; on all replicas, values of different shapes.
    """
    check_weight(weight)
    job = current()
    is_tensor = isinstance(value, torch.Tensor)
    tensor = value.detach() if is_tensor else torch.tensor(_number(value), dtype=torch.float64)
    if tensor.is_complex():
        return torch.view_as_complex(all_mean(torch.view_as_real(tensor), weight))
    flat = tensor.double().cpu().flatten()
    own = torch.cat([torch.tensor([float(weight)], dtype=torch.float64), flat * weight])
    if not weight:
        own.zero_()
    rows = job.check_equal({"the shape of all_mean's value": str(tuple(tensor.shape))}, own)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    mean = total[1:] / total[0] if total[0] else torch.full_like(flat, math.nan)
    if not is_tensor:
        return float(mean)
    dtype = tensor.dtype if tensor.is_floating_point() else mean.dtype
    return mean.view(tensor.shape).to(tensor.device, dtype)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise OptionError(
            "`value` must be a number or a tensor.",
            received=repr(value),
            fix="Use loss.item(), or a tensor with all numbers.",
        ) from None


def check_weight(weight: object) -> None:
    """Raise OptionError if this is not a weight."""
    if not (is_number(weight) and 0 <= weight < math.inf):
        raise OptionError(
            "`weight` must be a number of samples: at least 0, and finite.",
            received=f"weight={weight!r}",
            fix="Use len(inputs), or the number of tokens that the loss is a mean over.",
        )
