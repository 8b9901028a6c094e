"""Simulates compression between hosts: what each host sends, and what all hosts decode.

With compression, Lockstep promises this result, not that of one device. Like ``Reference``, this
simulation shares no code with the implementation that it checks. It computes a batch share by
share, sums the gradients of each host's shares, and rounds, quantizes or factorizes these sums.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, assert_never

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.own_loss import OwnLoss
from lockstep.data.trees import concatenate, map_tensors
from lockstep.errors import OptionError
from lockstep.plan.program.compression import (
    INT8_BLOCK,
    BFloat16,
    Compression,
    Int8,
    PowerSGD,
    TopK,
    compression_of,
)
from lockstep.plan.shares import num_filled_shares, share_bounds
from lockstep.proof.reference import DataOfBatch, Reference

Tensors = Sequence[torch.Tensor]

# From a parameter's name and a share to the host that sums the share's gradient.
HostOf = Callable[[str, int], int]


class SimulatedHosts:
    """Compressed sums over hosts, with error feedback.

    Args:
        compression: of the messages.
        num_hosts: number of hosts.
    """

    def __init__(self, compression: Compression, num_hosts: int) -> None:
        self._compression = compression
        self.num_hosts = num_hosts
        self._errors: dict[str, list[torch.Tensor]] = {}
        self._bases: dict[str, torch.Tensor] = {}
        self._num_sums: Counter[str] = Counter()

    @torch.no_grad()
    def sum(self, name: str, parts: Tensors) -> torch.Tensor:
        """The sum of a tensor's parts as all hosts decode them.

        Args:
            name: of the tensor.
            parts: one for each host.
        """
        how = compression_of(self._compression, parts[0].shape)
        self._num_sums[name] += 1
        is_early = isinstance(how, PowerSGD) and self._num_sums[name] <= how.warm_up
        if how is None or is_early:  # PowerSGD's first sums are exact and leave no error
            return torch.stack(list(parts)).sum(0)
        errors = self._errors.get(name, [torch.zeros_like(part) for part in parts])
        wanted = [part + error for part, error in zip(parts, errors, strict=True)]
        sent = self._factorized(name, wanted, how) if isinstance(how, PowerSGD) else []
        sent = sent or [_sent_alone(each, how) for each in wanted]
        self._errors[name] = [want - got for want, got in zip(wanted, sent, strict=True)]
        return torch.stack(sent).sum(0)

    def _factorized(self, name: str, wanted: Tensors, how: PowerSGD) -> list[torch.Tensor]:
        matrices = [each.reshape(len(each), -1) for each in wanted]
        basis = self._bases.get(name)
        if basis is None:
            basis = _drawn(matrices[0].shape[1], how.rank)
        directions = _orthonormal(torch.stack([each @ basis for each in matrices]).sum(0))
        factors = [each.T @ directions for each in matrices]
        basis = torch.stack(factors).sum(0)
        is_void = (directions == 0).all(0)
        self._bases[name] = torch.where(is_void, _drawn(*basis.shape), basis)
        return [(directions @ one.T).view_as(wanted[0]) for one in factors]


def _sent_alone(tensor: torch.Tensor, how: Compression) -> torch.Tensor:
    """The decoded tensor, for compressions that do not depend on other hosts."""
    flat = tensor.flatten()
    match how:
        case BFloat16():
            return tensor.bfloat16().to(tensor.dtype)
        case Int8():
            blocks = []
            for block in flat.split(INT8_BLOCK):
                step = block.abs().max() / 127
                blocks.append((block / step).round() * step if step else block)
            return torch.cat(blocks).view_as(tensor)
        case TopK():
            places = flat.abs().argsort(descending=True)[: how.count(len(flat))]
            return torch.zeros_like(flat).index_copy(0, places, flat[places]).view_as(tensor)
        case PowerSGD():
            raise AssertionError("its factors are those of all hosts")
        case _:
            assert_never(how)


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span the same space; zero for one that adds only rounding."""
    found: list[torch.Tensor] = []
    for column in columns.T:
        rest = column
        for one in (*found, *found):
            rest = rest - one * (one @ rest)
        is_new = rest.norm() > torch.finfo(rest.dtype).eps ** 0.5 * column.norm()
        found.append(rest / rest.norm() if is_new else torch.zeros_like(rest))
    return torch.stack(found, dim=1)


def _drawn(columns: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    return torch.randn(columns, rank, generator=generator, dtype=torch.float64)


def _rows(start: int, stop: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[start:stop]


class CompressedReference(Reference):
    """The plain loop with gradients that hosts compress.

    Args:
        args: see ``Reference``.
        hosts: the hosts.
        host_of: the host of each share's part of a gradient.
        options: see ``Reference``.

    Raises:
        OptionError: the batch cannot be computed share by share.
    """

    def __init__(self, *args: Any, hosts: SimulatedHosts, host_of: HostOf, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hosts = hosts
        self._host_of = host_of
        self._check_divisible()

    def _pass(self, number: int, data: DataOfBatch, num_shares: int) -> torch.Tensor | None:
        num_samples = len(data[1])
        bounds = share_bounds(num_samples, num_shares)
        bounds = bounds[: num_filled_shares(num_samples, num_shares)]
        batch, states = self._read(number, data, bounds, 0)
        models = [copy.deepcopy(self.model) for _ in bounds]

        def by_shares(*args: Any, **keywords: Any) -> Any:
            outputs = []
            for model, rows, state in zip(models, bounds, states, strict=True):
                own = map_tensors(partial(_rows, *rows), (args, keywords))
                torch.set_rng_state(state)
                outputs.append(model(*own[0], **own[1]))
            return concatenate(outputs)

        loss = self._loss_of(by_shares, self._loss, batch)
        if loss is None:
            return None
        loss.backward()
        for name, parameter in self._trainable():
            parts = [model.get_parameter(name).grad for model in models]
            if any(part is not None for part in parts):
                parameter.grad = self._exchanged(name, parameter, parts)
        return loss.detach()

    def _exchanged(
        self, name: str, parameter: torch.Tensor, parts: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """The sum of the shares' gradients as all hosts decode it."""
        sums = [torch.zeros_like(parameter) for _ in range(self._hosts.num_hosts)]
        for share, part in enumerate(parts):
            if part is not None:
                sums[self._host_of(name, share)] += part.to_dense() if part.is_sparse else part
        return self._hosts.sum(name, sums)

    def _check_divisible(self) -> None:
        sees_batch = any(isinstance(each, _BatchNorm) for each in self.model.modules())
        is_own = isinstance(self._loss, OwnLoss) or self._train_step is not None
        if sees_batch or is_own or self._dims:
            raise OptionError(
                "A proof of compression needs an output per sample and a loss function of outputs.",
                received="a model with BatchNorm or a loss of its own, a train_step, or batch_dim",
                fix="Verify it without `compression`.",
            )
