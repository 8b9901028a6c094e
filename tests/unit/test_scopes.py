"""Device scopes: what they mark, and that marks travel and change nothing."""

import copy
import pickle

import pytest
import torch
from torch import nn

import lockstep
from lockstep.capture.scopes import device_of
from lockstep.errors import OptionError


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with lockstep.device(0):
            self.encoder = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        with lockstep.device("cpu:1"):
            self.head = nn.Linear(3, 2)
        self.after = nn.Linear(2, 2)


def test_scopes_mark_what_is_made_in_them() -> None:
    model = Two()
    found = {name: device_of(model, name) for name, _ in model.named_modules()}
    assert found == {
        "": None,
        "encoder": 0,
        "encoder.0": 0,
        "encoder.1": 0,
        "head": 1,
        "after": None,
    }


def test_a_layer_that_is_made_in_a_scope_and_put_elsewhere_keeps_its_device() -> None:
    with lockstep.device(1):
        layer = nn.Linear(2, 2)
    assert device_of(nn.Sequential(nn.Linear(2, 2), layer), "1") == 1


def test_the_innermost_scope_counts_and_scopes_end() -> None:
    with lockstep.device(0):
        outer = nn.Linear(2, 2)
        with lockstep.device("cuda:2"):
            inner = nn.Linear(2, 2)
        again = nn.Linear(2, 2)
    outside = nn.Linear(2, 2)
    assert [device_of(one, "") for one in (outer, inner, again, outside)] == [0, 2, 0, None]


def test_a_parameter_of_the_models_own_marks_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with lockstep.device(1):
                self.scale = nn.Parameter(torch.ones(3))

    assert device_of(Scaled(), "") == 1


def test_marks_are_copied_and_pickled_and_no_part_of_the_state() -> None:
    model = Two()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert device_of(other, "head") == 1
    assert all("lockstep" not in name for name in model.state_dict())


@pytest.mark.parametrize("wrong", [-1, True, 1.0, "cpu", "tpu:1", None])
def test_what_is_no_device_is_refused(wrong: object) -> None:
    with pytest.raises(OptionError, match="A device is a number"), lockstep.device(wrong):  # type: ignore[arg-type]
        pass


def test_a_scope_ends_with_an_error_in_it() -> None:
    with pytest.raises(RuntimeError, match="as asked"), lockstep.device(1):
        raise RuntimeError("as asked")
    assert device_of(nn.Linear(2, 2), "") is None
