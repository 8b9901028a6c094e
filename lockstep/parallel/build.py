"""From a Plan to this rank's Worker."""

from collections.abc import Callable

import torch
from torch import nn

from lockstep.comm.exchange import (
    Exchange,
    ExchangeSpec,
    LocalExchange,
    SharedMemoryExchange,
)
from lockstep.comm.shared_memory import SharedRegion
from lockstep.parallel.batch_norm import BatchNorms
from lockstep.parallel.losses import LossAdapter
from lockstep.parallel.store import tensor_spec
from lockstep.parallel.update import Updater
from lockstep.parallel.worker import Worker
from lockstep.plan.layout import Piece
from lockstep.plan.spec import LocalUpdate, Plan


def exchange_spec(plan: Plan, model: nn.Module) -> ExchangeSpec:
    """The layout of the exchange: known before any process starts."""
    return ExchangeSpec(
        num_ranks=plan.num_ranks,
        num_shares=plan.num_shares,
        tensors=tuple(
            tensor_spec(name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ),
        row_capacity=BatchNorms(model).row_length,
    )


def build_exchange(
    plan: Plan,
    spec: ExchangeSpec,
    region: SharedRegion | None,
    *,
    rank: int,
    look_around: Callable[[float], None],
) -> Exchange:
    """This rank's end of the exchange that the Plan's update needs."""
    if isinstance(plan.update, LocalUpdate):
        return LocalExchange()
    assert region is not None
    return SharedMemoryExchange(spec, region, rank=rank, look_around=look_around)


def build_worker(
    plan: Plan,
    *,
    rank: int,
    model: nn.Module,
    loss: LossAdapter | None,
    updater: Updater | None,
    exchange: Exchange,
    spec: ExchangeSpec,
    seed: int,
    device: torch.device,
) -> Worker:
    """Put a rank's parts together."""
    return Worker(
        plan=plan,
        rank=rank,
        model=model,
        loss=loss,
        exchange=exchange,
        updater=updater,
        owned=_owned_pieces(plan, spec, updater, rank),
        seed=seed,
        device=device,
    )


def _owned_pieces(
    plan: Plan, spec: ExchangeSpec, updater: Updater | None, rank: int
) -> list[Piece]:
    if updater is None:
        return []
    return updater.divide(spec.extents, plan.num_ranks)[rank]
