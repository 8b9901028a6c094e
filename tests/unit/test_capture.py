"""Capturing: which layers, parameters and ties a model has."""

import pytest
import torch
from torch import nn

from lockstep.capture.layers import capture_layers
from lockstep.errors import ModelError
from lockstep.graph.layer_graph import LayerGraph
from tests.zoo import Case, cases


def names_of(graph: LayerGraph) -> list[str]:
    return [layer.name for layer in graph.layers]


class RootParameters(nn.Module):
    """Owns a parameter and a buffer itself, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("unset", None)
        self.register_parameter("absent", None)
        self.layer = nn.Linear(3, 3)


class TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


def test_layers_are_the_modules_that_own_something_in_order() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Flatten(), nn.Linear(3, 4)))
    graph = capture_layers(model)
    assert names_of(graph) == ["0", "2.1"]
    assert [layer.kind for layer in graph.layers] == ["Linear", "Linear"]
    assert graph.tied == ()
    assert graph.num_parameters == 2 * 3 + 3 + 3 * 4 + 4


def test_parameters_of_the_model_itself_belong_to_a_layer_without_a_name() -> None:
    first, second = capture_layers(RootParameters()).layers
    assert (first.name, first.kind, first.buffers) == ("", "RootParameters", ("shift",))
    assert [parameter.name for parameter in first.parameters] == ["scale"]
    assert [parameter.name for parameter in second.parameters] == ["layer.weight", "layer.bias"]


def test_a_parameter_is_described_by_shape_type_and_whether_it_trains() -> None:
    model = nn.Linear(4, 3, dtype=torch.float64)
    model.weight.requires_grad_(False)
    weight, bias = capture_layers(model).layers[0].parameters
    assert (weight.shape, weight.dtype, weight.trainable, weight.size) == (
        (3, 4),
        "float64",
        False,
        12,
    )
    assert (bias.shape, bias.trainable) == ((3,), True)


def test_a_parameter_without_dims_has_one_element() -> None:
    model = nn.ParameterDict({"temperature": nn.Parameter(torch.tensor(1.0))})
    (parameter,) = capture_layers(model).parameters
    assert (parameter.shape, parameter.size) == ((), 1)


def test_tied_parameters_are_listed_twice_and_counted_once() -> None:
    graph = capture_layers(TiedPair())
    assert graph.tied == (("embedding.weight", "head.weight"),)
    assert [parameter.name for parameter in graph.parameters] == ["embedding.weight", "head.bias"]
    assert graph.num_parameters == 7 * 4 + 7


def test_a_parameter_with_two_names_in_one_layer_is_tied_too() -> None:
    model = nn.Linear(2, 2)
    model.same = model.bias
    assert capture_layers(model).tied == (("bias", "same"),)


def test_a_module_used_twice_is_one_layer_under_its_first_name() -> None:
    shared = nn.Linear(3, 3)
    graph = capture_layers(nn.Sequential(shared, nn.ReLU(), shared))
    assert names_of(graph) == ["0"]
    assert graph.tied == ()


@pytest.mark.parametrize(
    ("layer", "flagged"),
    [
        (nn.BatchNorm1d(3), True),
        (nn.BatchNorm2d(3, affine=False), True),
        (nn.BatchNorm3d(3, affine=False, track_running_stats=False), True),  # owns nothing
        (nn.SyncBatchNorm(3), True),
        (nn.GroupNorm(1, 3), False),
        (nn.LayerNorm(3), False),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), False),
    ],
    ids=str,
)
def test_layers_that_see_the_whole_batch_are_flagged(layer: nn.Module, flagged: bool) -> None:
    graph = capture_layers(nn.Sequential(nn.Linear(3, 3), layer))
    assert [one.name for one in graph.layers if one.uses_batch_statistics] == ["1"] * flagged


def test_parameters_without_a_shape_yet_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4))
    with pytest.raises(ModelError, match=r"1\.weight, 1\.bias.*Call the model once"):
        capture_layers(model)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_graph_has_the_models_own_parameters_and_changes_nothing(case: Case) -> None:
    model = case.make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = capture_layers(model)
    found = {parameter.name: parameter.shape for parameter in graph.parameters}
    assert found == {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert [*found] == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
