"""The functions of ``horovod.torch`` that ``docs/migrating.md`` uses, by their documentation.

They go over gloo, in processes that torchrun has started.
"""

import atexit
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn, optim


def init() -> None:
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)


def size() -> int:
    return dist.get_world_size()


def rank() -> int:
    return dist.get_rank()


def broadcast_parameters(params: Mapping[str, torch.Tensor], root_rank: int) -> None:
    for tensor in params.values():
        dist.broadcast(tensor, root_rank)


def broadcast_optimizer_state(optimizer: optim.Optimizer, root_rank: int) -> None:
    assert not optimizer.state, "only what has no state yet is the same everywhere"


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> optim.Optimizer:
    """Averages gradients over the processes before each step."""
    parameters = [parameter for _, parameter in named_parameters]

    def average(*_: object) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= size()

    optimizer.register_step_pre_hook(average)
    return optimizer
