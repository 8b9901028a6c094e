"""The parameter store: parameters move into shared memory, and stay the user's own objects."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.shared_memory.shared_region import SharedRegion, is_dense
from lockstep.errors import ModelError
from lockstep.parallel.storage.store import (
    NamedParameters,
    ParameterStore,
    check_attributes,
    check_separate,
)
from tests.zoo import Case, case, cases


def parameters_of(model: nn.Module) -> NamedParameters:
    return list(model.named_parameters())


def channels_last_model() -> nn.Module:
    model = nn.Conv2d(3, 4, 3)
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    return model


def lies_in(tensor: Tensor, store: ParameterStore) -> bool:
    """Whether a write through another mapping of the region is seen in the tensor."""
    other = ParameterStore(store.specs, store.region)
    index = [view.data_ptr() for view in store.views].index(tensor.data_ptr())
    before = tensor.detach().clone()
    other.views[index].fill_(123)
    seen = bool((tensor == 123).all())
    other.views[index].copy_(before)
    return seen


@pytest.mark.parametrize("job", cases(), ids=lambda job: job.name)
def test_adopted_parameters_are_the_same_objects_with_the_same_values(job: Case) -> None:
    model = job.make_model()
    objects = [*model.parameters()]
    flags = [parameter.requires_grad for parameter in objects]
    values = [parameter.detach().clone() for parameter in objects]
    store = ParameterStore.adopt(parameters_of(model))
    assert [id(one) for one in model.parameters()] == [id(one) for one in objects]
    assert [parameter.requires_grad for parameter in objects] == flags
    assert all(map(torch.equal, model.parameters(), values))
    assert all(lies_in(parameter, store) for parameter in objects)


def test_a_layout_in_memory_is_kept() -> None:
    model = channels_last_model()
    assert isinstance(model.weight, Tensor)
    stride, value = model.weight.stride(), model.weight.detach().clone()
    ParameterStore.adopt(parameters_of(model))
    assert model.weight.stride() == stride
    assert torch.equal(model.weight, value)


def test_tied_parameters_stay_one() -> None:
    model = case("gpt_tied").make_model()
    store = ParameterStore.adopt(parameters_of(model))
    assert len(store.views) == len([*model.parameters()])
    head, embedding = model.get_parameter("head.weight"), model.get_parameter("embedding.weight")
    assert head is embedding


LAYOUTS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "contiguous": (lambda: torch.ones(2, 3, 4), True),
    "transposed": (lambda: torch.ones(2, 3, 4).transpose(0, 2), True),
    "channels last": (
        lambda: torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        True,
    ),
    "no dims": (lambda: torch.tensor(1.0), True),
    "no elements": (lambda: torch.ones(0, 3), True),
    "dims of one": (lambda: torch.ones(4, 1, 2)[:, :, :].as_strided((4, 1, 2), (2, 77, 1)), True),
    "every second": (lambda: torch.ones(8)[::2], False),
    "a corner": (lambda: torch.ones(4, 4)[:2, :2], False),
    "expanded": (lambda: torch.ones(1, 3).expand(4, 3), False),
    "overlapping": (lambda: torch.ones(8).unfold(0, 4, 2), False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_with_holes_or_overlaps_become_contiguous(name: str) -> None:
    make, dense = LAYOUTS[name]
    parameter = nn.Parameter(make())
    assert is_dense(parameter) == dense
    stride, value = parameter.stride(), parameter.detach().clone()
    ParameterStore.adopt([("p", parameter)])
    assert torch.equal(parameter, value)
    assert parameter.stride() == (stride if dense else parameter.contiguous().stride())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_before_bit_by_bit(name: str) -> None:
    models = [case("cnn_batch_norm").make_model() for _ in range(2)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    for step in range(4):
        if step == 1:  # in the midst of training
            ParameterStore.adopt(parameters_of(models[1]))
        for model, optimizer in zip(models, optimizers, strict=True):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


EXCHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "other memory": lambda parameter: torch.full((3, 3), 5.0),
    "another layout of it": lambda parameter: parameter.data.t(),
    "another type": lambda parameter: parameter.data.double() + 1,
    "other memory in another layout": lambda parameter: torch.arange(9.0).reshape(3, 3).t(),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_parameters_that_left_are_brought_back_with_their_new_values(name: str) -> None:
    model = nn.Linear(3, 3)
    store = ParameterStore.adopt(parameters_of(model))
    new = EXCHANGES[name](model.weight)
    expected = new.clone()
    model.weight.data = new
    store.readopt(parameters_of(model))
    assert model.weight.data_ptr() == store.views[0].data_ptr()
    assert model.weight.stride() == store.views[0].stride()
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, expected.float())
    assert lies_in(model.weight, store)


def test_parameters_that_stayed_are_left_alone() -> None:
    model = nn.Linear(3, 3)
    store = ParameterStore.adopt(parameters_of(model))
    model.load_state_dict(nn.Linear(3, 3).state_dict())
    version = model.weight._version
    store.readopt(parameters_of(model))
    assert model.weight._version == version


def test_parameters_that_exchanged_their_memory_are_brought_back() -> None:
    model = nn.ParameterList([torch.zeros(3), torch.ones(3)])
    store = ParameterStore.adopt(parameters_of(model))
    model[0].data, model[1].data = model[1].data.clone(), model[0].data.clone()
    store.readopt(parameters_of(model))
    assert [one.tolist() for one in model] == [[1.0] * 3, [0.0] * 3]


MISFITS: dict[str, Callable[[nn.Linear], object]] = {
    "another shape": lambda model: setattr(model, "weight", nn.Parameter(torch.ones(2, 3))),
    "another type": lambda model: model.double(),
    "another layout": lambda model: setattr(model.weight, "data", model.weight.data.t()),
    "one more": lambda model: model.register_parameter("more", nn.Parameter(torch.ones(1))),
    "one less": lambda model: model.register_parameter("bias", None),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_store_fits_the_parameters_it_was_made_for(name: str) -> None:
    model = nn.Linear(3, 3)
    store = ParameterStore.adopt(parameters_of(model))
    assert store.fits(parameters_of(model))
    MISFITS[name](model)
    assert not store.fits(parameters_of(model))


FLAT = torch.zeros(20)

ALIASES: dict[str, tuple[Tensor, Tensor]] = {
    "the same": (FLAT, FLAT),
    "overlapping": (FLAT[:10], FLAT[9:]),
    "one inside the other": (FLAT, FLAT[5:6]),
    "transposed": (FLAT.view(4, 5), FLAT.view(4, 5).t()),
}


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("turned", [False, True])
def test_parameters_in_the_same_memory_are_refused_by_name(name: str, turned: bool) -> None:
    parts = reversed(ALIASES[name]) if turned else ALIASES[name]
    model = nn.ParameterList([nn.Parameter(part) for part in parts])
    with pytest.raises(ModelError, match=r"same memory.*'(0|1)' and '(0|1)'.*one Parameter"):
        ParameterStore.adopt(parameters_of(model))


def test_a_parameter_between_two_buffers_that_share_memory_is_refused() -> None:
    names = [("x", nn.Parameter(FLAT[3:5]))]
    with pytest.raises(ModelError, match=r"'long' and 'x'"):
        check_separate(names, [("long", FLAT[:9]), ("short", FLAT[1:2])])


def test_an_attribute_in_the_memory_of_a_trained_parameter_is_refused() -> None:
    first = nn.Linear(2, 2)
    first.register_buffer("kept", first.weight.data[:1])  # another check's
    model = nn.Sequential(first, nn.LSTM(2, 2), nn.utils.spectral_norm(nn.Linear(2, 2)))
    check_attributes(model)
    vars(first)["rows"] = [first.weight.data[:1]]
    with pytest.raises(ModelError, match=r"'0.rows' and '0.weight'.*or the Parameter itself"):
        check_attributes(model)
    first.requires_grad_(False)
    check_attributes(model)


def test_neighbours_in_one_piece_of_memory_are_fine() -> None:
    parts = [FLAT[10:], FLAT[:10], torch.empty(0), torch.empty(0)]
    model = nn.ParameterList([nn.Parameter(part.clone()) for part in parts])
    for parameter, part in zip(model, parts, strict=True):
        parameter.data = part
    ParameterStore.adopt(parameters_of(model))
    assert [one.numel() for one in model] == [10, 10, 0, 0]


def test_a_mapping_of_the_same_specs_is_the_same_memory() -> None:
    model = case("unet").make_model()
    store = ParameterStore.adopt(parameters_of(model))
    descriptor = os.dup(store.region.descriptor)
    other = ParameterStore(store.specs, SharedRegion(descriptor, store.region.num_bytes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_()
    assert all(map(torch.equal, other.views, model.parameters()))
