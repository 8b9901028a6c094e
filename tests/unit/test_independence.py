"""How far apart a model's outputs for a share and for its halves may be."""

from contextlib import nullcontext

import msgspec
import pytest
import torch
from torch import Tensor, nn

from lockstep.capture.layers import capture_layers
from lockstep.cluster.devices import discover
from lockstep.data.sources import Batch
from lockstep.errors import ModelError
from lockstep.parallel.forward import ModelCall
from lockstep.parallel.independence import check_apart
from lockstep.plan.makers import SingleDevice


class _Rounds(nn.Module):
    """Makes more of many samples, by less than bfloat16 rounds."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.003 * (len(x) > 2))


@pytest.mark.parametrize("is_low", [False, True])
def test_what_computes_in_less_than_float32_may_round_so(is_low: bool) -> None:
    batch = Batch(inputs=torch.ones(4, 3), targets=None, sample_weight=None, num_samples=4)
    model = _Rounds()
    with nullcontext() if is_low else pytest.raises(ModelError, match=r"differ by 0.3%"):
        check_apart(model, model, batch, is_low=is_low)


@pytest.mark.parametrize(
    ("precision", "is_low"),
    [("fp32", False), ("fp64", False), ("bf16-mixed", True), ("fp16-mixed", True), ("bf16", True)],
)
def test_a_call_knows_whether_it_does(precision: str, is_low: bool) -> None:
    model = nn.Linear(2, 2)
    plan = SingleDevice()(capture_layers(model), discover(), 4)
    plan = msgspec.structs.replace(plan, precision=precision)
    assert ModelCall(model, plan, torch.device("cpu")).is_low == is_low
    # There torch takes float32 for TF32 in convolutions, unless it is told not to.
    assert ModelCall(model, plan, torch.device("cuda", 0)).is_low == (precision != "fp64")
