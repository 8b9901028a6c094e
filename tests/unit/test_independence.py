"""How far apart a model's outputs for a share and for its halves may be."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import msgspec
import pytest
import torch
from torch import Tensor, nn

from lockstep.capture.layers import capture_layers
from lockstep.cluster.devices import discover
from lockstep.data.map_style.sources import Batch
from lockstep.errors import ModelError
from lockstep.parallel.data_parallel import forward
from lockstep.parallel.data_parallel.forward import ModelCall
from lockstep.parallel.independence import gradient_trial, sample_independence, split_trial
from lockstep.parallel.independence.sample_independence import check_sample_independence
from lockstep.plan.makers.data_parallel import SingleDevice


class _Rounds(nn.Module):
    """Makes more of many samples, by less than bfloat16 rounds."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.003 * (len(x) > 2))


@pytest.mark.parametrize("is_low", [False, True])
def test_what_computes_in_less_than_float32_may_round_so(is_low: bool) -> None:
    batch = Batch(inputs=torch.ones(4, 3), targets=None, sample_weight=None, num_samples=4)
    model = _Rounds()
    with nullcontext() if is_low else pytest.raises(ModelError, match=r"differ by 0.3%"):
        check_sample_independence(model, model, batch, is_low=is_low)


class _Normalises(nn.Module):
    """By a function, which takes no single samples."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer, self.features = nn.Linear(3, features), features

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(self.layer(x), None, None, training=True)


class _Pairs(nn.Module):
    """Takes pairs of samples, of which each goes by itself."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 4:
            raise ValueError("no pairs of pairs")
        return nn.functional.dropout(x.exp())


@pytest.mark.parametrize("count", [2, 3])
def test_a_model_that_fails_on_halves_is_tried_on_as_many_samples(count: int) -> None:
    inputs = torch.randn(count, 3)
    batch = Batch(inputs=inputs, targets=None, sample_weight=None, num_samples=count)
    with pytest.raises(ModelError, match="must not depend on the other samples"):
        check_sample_independence(model := _Normalises(4), model, batch)
    batch = Batch(inputs=torch.randn(4, 3), targets=None, sample_weight=None, num_samples=4)
    check_sample_independence(model_of_pairs := _Pairs(), model_of_pairs, batch)


class _Keeps(nn.Module):
    """Has the last samples in an attribute."""

    last = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x.exp()


@pytest.mark.parametrize("model", [_Keeps(), _Pairs(), nn.Linear(3, 2)], ids=lambda one: str(one))
def test_a_compiled_model_is_compiled_for_no_trial(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For other sizes than those of training: it would then be compiled for sizes of any kind."""
    blocks: list[None] = []
    called: list[bool] = []

    @contextmanager
    def uncompiled() -> Iterator[None]:
        blocks.append(None)
        yield
        blocks.pop()

    def call(x: Tensor) -> Tensor:
        called.append(bool(blocks))
        result: Tensor = model(x)
        return result

    for module in (sample_independence, split_trial, gradient_trial):
        monkeypatch.setattr(module, "uncompiled", uncompiled)
    batch = Batch(inputs=torch.randn(4, 3), targets=None, sample_weight=None, num_samples=4)
    check_sample_independence(model, call, batch)
    assert called == [True] * len(called) != []


def test_a_single_sample_is_tried_beside_another() -> None:
    for inputs in (torch.randn(1, 3), torch.tensor([[1, 2, 3]])):
        batch = Batch(inputs=inputs, targets=None, sample_weight=None, num_samples=1)
        with pytest.raises(ModelError, match="must not depend on the other samples"):
            check_sample_independence(nn.Identity(), lambda x: x - 0.5 * x.double().mean(0), batch)


@pytest.mark.parametrize(
    ("precision", "is_low"),
    [("fp32", False), ("fp64", False), ("bf16-mixed", True), ("fp16-mixed", True), ("bf16", True)],
)
def test_a_call_knows_whether_it_does(
    precision: str, is_low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "rounds_attention", lambda device: False)
    model = nn.Linear(2, 2)
    plan = SingleDevice()(capture_layers(model), discover(), 4)
    plan = msgspec.structs.replace(plan, precision=precision)
    assert ModelCall(model, plan, torch.device("cpu")).is_low == is_low
    # There torch takes float32 for TF32 in convolutions, unless it is told not to.
    assert ModelCall(model, plan, torch.device("cuda", 0)).is_low == (precision != "fp64")
