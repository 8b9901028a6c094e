"""Models whose backward pass mixes samples are refused; those whose does not, never."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.data.map_style.sources import Batch
from lockstep.errors import ModelError
from lockstep.parallel.independence.sample_independence import check_sample_independence

TOKENS = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 1, 4], [2, 2, 0], [5, 6, 3]])
FLOATS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


class Embeds(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        bags = nn.EmbeddingBag(10, 3, mode="sum", scale_grad_by_freq=kind == "bag")
        self.kind = kind
        self.table: nn.Module = bags if kind in ("bag", "plain bag") else nn.Embedding(10, 3)
        if kind == "module":
            self.table = nn.Embedding(10, 3, scale_grad_by_freq=True)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.kind == "function":
            rows = F.embedding(tokens, self.table.get_parameter("weight"), scale_grad_by_freq=True)
        else:
            rows = self.table(tokens)
        out: Tensor = self.head(rows if rows.dim() == 2 else rows.sum(1))
        return out


class Large(nn.Module):
    """Its table is so large that a sketch of its gradient is kept."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50_001, 3, **options), nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(tokens).sum(1))
        return out


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(torch.tanh(self.first(x))))
        return out


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def between(x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(hook)
        return x

    return between


class Centers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient - 0.5 * gradient.mean(0)


def through(x: Tensor) -> Tensor:
    mean = x.mean(0)
    return x + (mean - mean.detach())


def with_module_hook(hook: Any, register: str = "register_full_backward_hook") -> nn.Module:
    model = Between(nn.Identity())
    getattr(model.first, register)(hook)
    return model


def mixing(name: str) -> tuple[nn.Module, Tensor]:
    match name:
        case "module" | "bag" | "function":
            return Embeds(name), TOKENS
        case "hook, norm":
            return Between(hooked(lambda g: g / g.norm())), FLOATS
        case "hook, mean":
            return Between(hooked(lambda g: g - g.mean(0))), FLOATS
        case "hook, by number":
            return Between(hooked(lambda g: g / len(g))), FLOATS
        case "function with a mean":
            return Between(Centers.apply), FLOATS
        case "straight through":
            return Between(through), FLOATS
        case "backward hook":
            return with_module_hook(lambda module, ins, outs: (ins[0] / ins[0].norm(),)), FLOATS
        case "pre-hook":
            hook = lambda module, outs: (outs[0] / outs[0].std(),)  # noqa: E731
            return with_module_hook(hook, "register_full_backward_pre_hook"), FLOATS
    raise KeyError(name)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(
    "name",
    [
        *("module", "bag", "function", "hook, norm", "hook, mean", "hook, by number"),
        *("function with a mean", "straight through", "backward hook", "pre-hook"),
    ],
)
def test_what_mixes_samples_in_backward_is_refused(name: str, rows: int) -> None:
    torch.manual_seed(0)
    model, data = mixing(name)
    if name == "backward hook":  # with gradients of its inputs
        model = nn.Sequential(nn.Linear(3, 3), model)
    wanted = "table.weight" if data is TOKENS else "first.weight|0.weight"
    with pytest.raises(ModelError, match=f"gradients of .*({wanted})"):
        check_sample_independence(model, model, batch_of(data[:rows]))
    assert all(one.grad is None for one in model.parameters())


class CrossesKink(torch.autograd.Function):
    """Another gradient where a sample runs alone, as if rounding had gone to a kink's other side.

    So it is for samples whose first feature is a half.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (marked,) = ctx.saved_tensors
        return gradient * (1.0 + marked[:, None] * (len(gradient) == 1)), None


@pytest.mark.parametrize(("marked", "is_refused"), [([0], False), ([0, 2], True)])
def test_one_sample_at_a_kink_is_no_mixing(marked: list[int], is_refused: bool) -> None:
    class Kinked(Between):
        def forward(self, x: Tensor) -> Tensor:
            marked = (x[:, 0] == 0.5).to(x)
            hidden: Tensor = CrossesKink.apply(self.first(x).tanh(), marked)  # type: ignore[no-untyped-call]
            return self.last(hidden)  # type: ignore[no-any-return]

    inputs = FLOATS.clone()
    inputs[marked, 0] = 0.5
    model = Kinked(through)
    if is_refused:
        with pytest.raises(ModelError, match="gradients of first"):
            check_sample_independence(model, model, batch_of(inputs))
    else:
        check_sample_independence(model, model, batch_of(inputs))


class Recomputes(Between):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def by_row(gradient: Tensor) -> Tensor:
    rows: Tensor = gradient / gradient.norm(dim=1, keepdim=True)
    return rows


def clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(min=-1e-3)


def apart(name: str) -> tuple[nn.Module, Tensor]:
    match name:
        case "embedding" | "plain bag":
            return Embeds(name), TOKENS
        case "sparse":
            model = Embeds("embedding")
            model.table = nn.Embedding(10, 3, sparse=True)
            return model, TOKENS
        case "hook by row":
            return Between(hooked(by_row)), FLOATS
        case "clip by element":
            return Between(hooked(clipped)), FLOATS
        case "dropout":
            return Between(nn.Dropout(0.5)), FLOATS
        case "rrelu":  # keeps what it has drawn for backward
            return Between(nn.RReLU(0.1, 0.9)), FLOATS
        case "recomputed dropout":
            return Recomputes(nn.Dropout(0.5)), FLOATS
        case "kinks":
            return Between(nn.ReLU()), torch.zeros(6, 3)
        case "norm":
            return Between(nn.BatchNorm1d(4)), FLOATS
        case "attention":
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            return nn.Sequential(nn.Linear(3, 4), layer), FLOATS[:, None].expand(-1, 5, -1)
        case "looks on":
            return with_module_hook(lambda module, ins, outs: None), FLOATS
        case "two outputs":
            return Scaled(), FLOATS
    raise KeyError(name)


class Scaled(nn.Module):
    """Returns a temperature, and as many prototypes as there are samples in a half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(()))
        self.prototypes = nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x) * self.scale, self.scale.exp(), self.prototypes.exp()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        *("embedding", "plain bag", "sparse", "hook by row", "clip by element", "dropout"),
        *("rrelu", "recomputed dropout", "kinks", "norm", "attention", "looks on", "two outputs"),
    ],
)
def test_what_does_not_is_not(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, data = apart(name)
    model = model.to(dtype)
    data = data.to(dtype) if data.is_floating_point() else data
    state = torch.random.get_rng_state()
    for rows in (1, 2, 3, 6):
        is_linear = check_sample_independence(
            model, model, batch_of(data[:rows]), is_low=dtype == torch.bfloat16
        )
        assert is_linear == (name not in ("hook by row", "clip by element"))
    assert torch.equal(state, torch.random.get_rng_state())


def batch_of(inputs: Tensor) -> Batch:
    return Batch(inputs=inputs, targets=None, sample_weight=None, num_samples=len(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sketches_of_large_gradients_show_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    is_low = dtype == torch.bfloat16
    model = Large().to(dtype)
    assert check_sample_independence(model, model, batch_of(TOKENS), is_low=is_low)
    model = Large(scale_grad_by_freq=True).to(dtype)
    with pytest.raises(ModelError, match=r"gradients of .*table\.weight"):
        check_sample_independence(model, model, batch_of(TOKENS), is_low=is_low)
