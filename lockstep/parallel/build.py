"""From a Plan to this rank's Worker."""

from collections.abc import Callable

import torch
from torch import nn

from lockstep.comm.exchange import Exchange, LocalExchange, TensorSpec
from lockstep.comm.gradient_rows import GradientSpec
from lockstep.comm.shared_exchange import ExchangeSpec, SharedMemoryExchange
from lockstep.comm.shared_memory import SharedRegion
from lockstep.parallel.batch_norm import BatchNorms
from lockstep.parallel.losses import LossAdapter
from lockstep.parallel.store import tensor_spec
from lockstep.parallel.update import Updater
from lockstep.parallel.worker import Worker
from lockstep.plan.layout import Piece
from lockstep.plan.spec import LocalUpdate, Plan


def exchange_spec(plan: Plan, model: nn.Module, updater: Updater | None) -> ExchangeSpec:
    """The layout of the exchange: known before any process starts."""
    limits = {f"{layer.name}.weight".lstrip("."): layer.row_limit for layer in plan.layers}
    trainable = [
        (tensor_spec(name, parameter), limits.get(name, 0))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and updater is not None
    ]
    return ExchangeSpec(
        num_ranks=plan.num_ranks,
        num_shares=plan.num_shares,
        gradients=GradientSpec(
            num_shares=plan.num_shares,
            tensors=tuple(spec for spec, _ in trainable),
            row_limits=tuple(
                limit if updater is not None and updater.is_elementwise and _has_rows(spec) else 0
                for spec, limit in trainable
            ),
        ),
        row_capacity=BatchNorms(model).row_length,
    )


def _has_rows(spec: TensorSpec) -> bool:
    """Whether a weight lies in memory row by row."""
    return len(spec.shape) == 2 and spec.stride == (spec.shape[1], 1)


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
    return updater.divide(spec.gradients.extents, plan.num_ranks, plan.num_shares)[rank]
