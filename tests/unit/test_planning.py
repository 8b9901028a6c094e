"""Planning again after a call has left the model elsewhere."""

import torch
from torch import nn

from lockstep.train.runtime.planning import Planning, _place_of


class _Elsewhere(nn.Module):
    """A model that says it is on a device which is not there."""

    def parameters(self, recurse: bool = True) -> object:  # type: ignore[override]
        return iter([_On()])


class _On:
    device = torch.device("cuda", 1)


def test_samples_go_where_the_model_is() -> None:
    assert _place_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert _place_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    partly = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert _place_of(partly) == torch.device("meta")
    assert _place_of(_Elsewhere()) == torch.device("cuda:1")
    assert _place_of(nn.ReLU()) == torch.device("cpu")


def test_a_trace_holds_for_one_kind_of_device() -> None:
    planning, one = Planning(nn.Linear(2, 2)), torch.ones(2, 2)
    assert planning._digest(one) == planning._digest(torch.zeros(2, 2))
    assert planning._digest(one) != planning._digest(one.to("meta"))
