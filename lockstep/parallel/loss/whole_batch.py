"""Computes the loss of a whole batch, of which every rank has some shares.

Some losses of a batch do not follow from its shares' losses: a contrastive loss, Dice, the root of
a mean, a mean without padding. Such a loss is computed once, on the outputs of all shares. They are
published for all ranks; every rank concatenates them, computes the same loss with the same random
numbers, and goes backward from its own shares' part of the gradient.

Outputs are concatenated along their first dim. Outputs without a row per sample (a temperature)
must be the same in all shares: their gradient goes to the first share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.capture.seeding import seeded
from lockstep.comm.codec.message_codec import decode, encode
from lockstep.comm.exchange import Exchange
from lockstep.comm.shared_memory.gathering import gather_bytes
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree, map_leaves, map_tensors, tensors_of
from lockstep.errors import LossError
from lockstep.formatting import format_bytes, listed
from lockstep.parallel.loss.share_losses import JointLoss, LossAdapter, ShareLoss


@dataclass(frozen=True, kw_only=True)
class SharePart:
    """A share's part of a batch.

    Attributes:
        output: the model's.
        batch: its samples.
    """

    output: Tree
    batch: Batch

    @property
    def tree(self) -> Tree:
        """The inputs of the loss."""
        return self.output, self.batch.targets, self.batch.sample_weight


class WholeBatch:
    """A batch, concatenated from all shares.

    Args:
        exchange: of this rank.
        own: the parts of this rank's shares.
        num_filled: number of shares with samples.
        device: where the loss is computed.

    Attributes:
        num_bytes: bytes that all shares have published for it.

    Raises:
        LossError: outputs cannot be concatenated.
    """

    def __init__(
        self,
        exchange: Exchange,
        own: Mapping[int, SharePart],
        num_filled: int,
        device: torch.device,
    ) -> None:
        payloads = {share: _encoded(part) for share, part in own.items()}
        self._own = own
        gathered = gather_bytes(exchange, payloads, num_filled)
        self.num_bytes = sum(map(len, gathered))
        shares = list(map(decode, gathered))
        self._num_samples = [share["samples"] for share in shares]
        if any(share["others"] != shares[0]["others"] for share in shares):
            raise _unlike("values that are no tensors and differ from share to share")
        if len({len(share["tensors"]) for share in shares}) > 1:
            raise _unlike("other numbers of tensors in one share than in another")
        # The tensors from which this rank's shares go backward are leaves.
        self._leaves = [[one.detach().to(device) for one in share["tensors"]] for share in shares]
        for leaves, share in zip(self._leaves, shares, strict=True):
            for leaf, is_trained in zip(leaves, share["trained"], strict=True):
                leaf.requires_grad_(is_trained and torch.is_grad_enabled())
        first = own[min(own)]
        num_outputs = len(list(tensors_of(first.output)))
        columns = list(zip(*self._leaves, strict=True))
        joined = iter(
            [*map(self._output, columns[:num_outputs]), *map(self._rows, columns[num_outputs:])]
        )
        self._tree = map_tensors(lambda _: next(joined), first.tree)

    def loss(self, adapter: LossAdapter) -> ShareLoss:
        """The loss of the batch."""
        output, targets, weights = self._tree
        num_samples = sum(self._num_samples)
        batch = Batch(inputs=None, targets=targets, sample_weight=weights, num_samples=num_samples)
        found: ShareLoss | JointLoss = adapter(output, batch)
        if isinstance(found, JointLoss):
            return found.settled(found.weights, num_samples)
        return found

    def divided(self, loss: ShareLoss, trainable: Sequence[torch.Tensor]) -> dict[int, ShareLoss]:
        """This rank's shares' parts: the first share has the total, each its gradients.

        Args:
            loss: of the batch.
            trainable: parameters that the loss may use directly, such as for a penalty.
        """
        direct = [one for one in trainable if one.requires_grad] if 0 in self._own else []
        own = [leaf for share in self._own for leaf in self._leaves[share] if leaf.requires_grad]
        gradients = _gradients(loss, [*own, *direct])
        return {
            share: self._part(loss, share, part, gradients, direct if share == 0 else ())
            for share, part in self._own.items()
        }

    def _part(
        self,
        loss: ShareLoss,
        share: int,
        part: SharePart,
        gradients: Mapping[int, torch.Tensor],
        direct: Sequence[torch.Tensor],
    ) -> ShareLoss:
        roots = list(zip(tensors_of(part.tree), self._leaves[share], strict=True))
        roots += zip(direct, direct, strict=True)
        found = [(value, gradients[id(leaf)]) for value, leaf in roots if id(leaf) in gradients]
        return ShareLoss(
            values=tuple(value for value, _ in found),
            seeds=tuple(gradient for _, gradient in found),
            total=loss.total if share == 0 else 0.0,
            weight=loss.weight if share == 0 else 0.0,
            parts=loss.parts if share == 0 else (),
        )

    def _output(self, column: Sequence[torch.Tensor]) -> torch.Tensor:
        """One output of all shares; not a leaf, so that it may be changed in place."""
        if any(not tensor.equal(column[0]) for tensor in column[1:]):
            return self._rows(column)
        if not have_rows(column, self._num_samples):
            return column[0].clone()
        if column[0].unique(dim=0).shape[0] > 1:
            raise _unlike("the same rows from every share, which may be samples or not")
        return self._rows(column)

    def _rows(self, column: Sequence[torch.Tensor]) -> torch.Tensor:
        is_ragged = len({tensor.shape[1:] for tensor in column}) > 1
        if is_ragged or not have_rows(column, self._num_samples):
            shown = dict.fromkeys(str(tuple(tensor.shape)) for tensor in column)
            raise _unlike(f"tensors of shape {listed(shown)} in shares of {self._num_samples}")
        return torch.cat(tuple(column))


def have_rows(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """True if each sample has the same number of rows in tensors of so many samples."""
    if any(not tensor.dim() for tensor in tensors):
        return False
    counts = {divmod(len(one), size) for one, size in zip(tensors, sizes, strict=True)}
    return len(counts) == 1 and all(each > 0 and not rest for each, rest in counts)


def whole_batch_note(loss: LossAdapter) -> str:
    """The Plan's note on a loss that is computed on whole batches."""
    much = ""
    if loss.gathered_bytes:
        much = f": {format_bytes(loss.gathered_bytes)} of outputs and targets per step"
    return (
        f"the loss is taken on the whole batch{much}; if it is a mean, return values of shape (n,) "
        "or (total, weight), and no outputs are exchanged"
    )


def _encoded(part: SharePart) -> bytes:
    tensors = list(tensors_of(part.tree))
    others: list[Any] = []
    map_leaves(bool | int | float | str, others.append, part.tree)  # type: ignore[arg-type]
    return encode(
        {
            "samples": part.batch.num_samples,
            "tensors": [tensor.detach() for tensor in tensors],
            "trained": [tensor.requires_grad for tensor in tensors],
            "others": others,
        }
    )


def _gradients(loss: ShareLoss, sources: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Gradients of the loss's total, by tensor id, for the sources that it depends on."""
    roots = [
        (value, seed if isinstance(seed, torch.Tensor) else torch.full_like(value, seed))
        for value, seed in zip(loss.values, loss.seeds, strict=True)
        if value.requires_grad
    ]
    if not roots or not sources:
        return {}
    values, seeds = zip(*roots, strict=True)
    found = torch.autograd.grad(seeded(values, seeds), sources, allow_unused=True)
    return {
        id(source): gradient
        for source, gradient in zip(sources, found, strict=True)
        if gradient is not None
    }


def _unlike(received: str) -> LossError:
    return LossError(
        "The loss is computed on the outputs of the whole batch: every tensor of outputs and "
        "targets must have a row for each sample, or be the same for all samples.",
        received=received,
        fix="Return tensors of shape (samples, ...), padded to one shape; or let the loss "
        "return values of shape (n,) or a pair (total, weight), which need no other outputs.",
    )
