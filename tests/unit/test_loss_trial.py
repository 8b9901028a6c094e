"""Losses of which a share says too little: they fail on it, or decide by the number of samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data.map_style.sources import Batch
from lockstep.parallel.loss.function_losses import FunctionAdapter

SHARE, BATCH = 4, 12
PROTOTYPES = torch.randn(2 * SHARE, 3)


def decided(few: Callable[..., Any], many: Callable[..., Any], limit: int = 7) -> Any:
    def loss(output: Tensor, target: Tensor) -> Any:
        return few(output, target) if len(output) < limit else many(output, target)

    return loss


def distances(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean(1)


def normalised(output: Tensor, target: Tensor) -> Tensor:
    values = distances(output, target)
    return values * values / values.mean()


def hardest(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    values = distances(output, target)
    return values.topk(min(len(values), 3)).values.sum(), 3


def pairs(output: Tensor, target: Tensor) -> Tensor:
    one, two = output.view(-1, 2, 3).unbind(1)
    return F.mse_loss(one, two)


def refuse(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("too few")


def hooked(output: Tensor, target: Tensor) -> Tensor:
    output = output * 1.0
    output.register_hook(lambda gradient: gradient / gradient.norm())
    return distances(output, target)


def clipped(output: Tensor, target: Tensor) -> Tensor:
    output = output * 1.0
    output.register_hook(lambda gradient: gradient.clamp(min=-1e-3))
    return distances(output, target)


WHOLE: dict[str, Callable[..., Any]] = {
    "topk": lambda output, target: distances(output, target).topk(7).values.mean(),
    "kthvalue": lambda output, target: distances(output, target).kthvalue(7).values,
    "index": lambda output, target: output[6].square().sum(),
    "chunk": lambda output, target: F.mse_loss(*output.split([6, 6])),
    "pairs": pairs,
    "raises": decided(refuse, F.mse_loss),
    "nothing for few": decided(lambda output, target: None, F.mse_loss),
    "zero for few": decided(lambda output, target: output.sum() * 0, F.mse_loss),
    "another mean for few": decided(F.l1_loss, F.mse_loss),
    "other values for few": decided(lambda o, t: 0 * distances(o, t), distances),
    "another pair for few": decided(lambda o, t: (0 * o.sum(), 4.0), lambda o, t: (o.sum(), 4.0)),
    "by a size of targets": lambda o, t: F.mse_loss(o, t) * (1 if t.shape[0] > 6 else 2),
    "values that compare": normalised,
    "a pair that compares": hardest,
    "a pair of a mean and 1": lambda output, target: (F.mse_loss(output, target), 1),
    "values that compare in backward": hooked,
    "values of fewer": lambda output, target: distances(output, target).topk(4).values,
}
SHARES: dict[str, Callable[..., Any]] = {
    "a mean": F.mse_loss,
    "a function with a mean": lambda output, target: distances(output, target).mean(),
    "asks for sizes": lambda o, t: F.mse_loss(o.view(o.shape[0], -1), t.view(len(t), -1)),
    "flat": lambda o, t: F.mse_loss(o.reshape(-1, o.shape[-1]), t.reshape(-1, t.shape[-1])),
    "values": lambda output, target: torch.einsum("ij,ij->i", output, target),
    "values that are clipped in backward": clipped,
    "a pair": lambda o, t: (((o - t).square() * (t > 0)).sum(), (t > 0).sum()),
    "a pair with noise": lambda o, t: (distances(o + torch.randn_like(o), t).sum(), len(o)),
    "a pair with a constant": lambda o, t: ((o @ PROTOTYPES.T).logsumexp(1).sum(), len(o)),
}


def share_of(loss: Any, size: int = SHARE, output: Any = None) -> Any:
    adapter = FunctionAdapter(loss)
    adapter.begin(BATCH, -(-BATCH // size))
    generator = torch.Generator().manual_seed(size)
    given = 1.0 * torch.randn(size, 3, generator=generator).requires_grad_()
    target = torch.randn(size, 3, generator=generator)
    batch = Batch(inputs=None, targets=target, sample_weight=None, num_samples=size)
    return adapter(given if output is None else output(given), batch)


@pytest.mark.parametrize("size", [1, 3, SHARE])
@pytest.mark.parametrize("name", WHOLE)
def test_losses_that_need_the_batch(name: str, size: int) -> None:
    assert share_of(WHOLE[name], size).is_guess


@pytest.mark.parametrize("size", [3, SHARE])
@pytest.mark.parametrize("name", SHARES)
def test_losses_of_which_shares_say_all(name: str, size: int) -> None:
    assert not share_of(SHARES[name], size).is_guess


def test_what_else_a_model_returns_says_nothing() -> None:
    """Class prototypes, as many as a multiple of the samples; a list with a row for each sample."""

    def by_prototypes(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, int]:
        return torch.cdist(output[0], output[1]).square().amin(1).sum(), len(target)

    def by_list(output: list[Tensor], target: Tensor) -> tuple[Tensor, int]:
        both = zip(output, target, strict=True)
        return torch.stack([F.mse_loss(one, other) for one, other in both]).sum(), len(target)

    assert not share_of(by_prototypes, output=lambda given: (given, PROTOTYPES)).is_guess
    assert not share_of(by_list, output=lambda given: list(given)).is_guess


def test_a_loss_is_tried_once_and_left_as_it_was() -> None:
    calls: list[int] = []

    class Counting:
        count = 0

        def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
            self.count += 1
            calls.append(len(output))
            return distances(output, target).sum(), len(output)

    loss = Counting()
    adapter = FunctionAdapter(loss)
    adapter.begin(BATCH, 3)
    output = 1.0 * torch.randn(SHARE, 3, requires_grad=True)
    batch = Batch(inputs=None, targets=torch.randn(SHARE, 3), sample_weight=None, num_samples=SHARE)
    for _ in range(2):
        adapter(output, batch)
    first, again = [SHARE, SHARE, 2, 2, BATCH], [SHARE, SHARE]  # since it has attributes
    assert calls == [*first, *again, SHARE]
    assert loss.count == 2
