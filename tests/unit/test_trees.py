"""Trees keep their structure and kind, whatever is done to their tensors."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.data.trees import concatenate, map_tensors, tensors_of
from lockstep.errors import ModelError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    left: Any
    right: Any
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.made + 1)


class ModelOutput(OrderedDict[str, Any]):
    """As in Hugging Face's transformers: built from keywords, keys are attributes too."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
        vars(self).update(fields)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        vars(self)[key] = value


ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])

TREES: dict[str, Any] = {
    "a tensor": ONE,
    "a tuple": (ONE, TWO),
    "a list": [ONE, (TWO,)],
    "a dict": {"a": ONE, 3: [TWO]},
    "a named tuple": Pair(ONE, {"b": TWO}),
    "a dataclass": Record(ONE, [TWO, None]),
    "an ordered dict with any keys": OrderedDict([(2, ONE), ("b", TWO)]),
    "a default dict": defaultdict(list, {"a": ONE}),
    "a model output": ModelOutput(logits=ONE, hidden=(TWO,)),
    "with what is no tensor": (ONE, None, "text", 4),
    "empty": (),
}


def plain(tree: Any) -> Any:
    return tree.tolist() if isinstance(tree, Tensor) else tree


@pytest.mark.parametrize("name", TREES)
def test_mapping_keeps_the_structure_and_its_kinds(name: str) -> None:
    tree = TREES[name]
    mapped = map_tensors(lambda tensor: tensor * 10, tree)
    assert type(mapped) is type(tree)
    assert [one.item() for one in tensors_of(mapped)] == [
        10 * one.item() for one in tensors_of(tree)
    ]
    assert repr(map_tensors(plain, mapped)) == repr(
        map_tensors(lambda tensor: (tensor * 10).tolist(), tree)
    )


@pytest.mark.parametrize("name", TREES)
def test_mapping_leaves_the_original_alone(name: str) -> None:
    before = repr(TREES[name])
    map_tensors(lambda tensor: tensor * 10, TREES[name])
    assert repr(TREES[name]) == before


@pytest.mark.parametrize("name", TREES)
def test_joining_puts_the_samples_of_all_trees_one_after_the_other(name: str) -> None:
    tree = TREES[name]
    joined = concatenate([tree, map_tensors(lambda tensor: tensor + 5, tree)])
    assert type(joined) is type(tree)
    assert [one.tolist() for one in tensors_of(joined)] == [
        [one.item(), one.item() + 5] for one in tensors_of(tree)
    ]


def test_a_default_dict_keeps_its_default_and_attributes_follow_keys() -> None:
    assert map_tensors(plain, TREES["a default dict"])["new"] == []
    output = map_tensors(plain, TREES["a model output"])
    assert output.logits == output["logits"] == [1.0]


def test_tensors_come_in_order() -> None:
    tree = ({"b": ONE, "a": TWO}, [None, ONE])
    assert [one.item() for one in tensors_of(tree)] == [1.0, 2.0, 1.0]


# --- what cannot be joined ----------------------------------------------------------------------

UNLIKE: dict[str, tuple[list[Any], str]] = {
    "no dims": ([ONE[0], TWO[0]], r"one row per sample.*shape \(\)"),
    "one without dims": ([ONE[0]], r"one row per sample.*shape \(\)"),
    "other rows": ([torch.ones(2, 3), torch.ones(2, 4)], r"\(2, 3\), \(2, 4\)"),
    "lists of other length": ([[ONE], [ONE, TWO]], "a list of 1 and of 2"),
    "a tensor or none": ([ONE, None], "NoneType.*Tensor"),
    "none or a tensor": ([None, ONE], "NoneType.*Tensor"),
    "other keys": ([{"a": ONE}, {"b": ONE}], r"\['a'\], \['b'\]"),
    "numbers": ([(ONE, 1.0), (ONE, 2.0)], "a float that differs"),
    "arrays": ([np.ones(2), np.ones(2)], "a ndarray that differs"),
    "objects": ([object(), object()], "a object that differs"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_cannot_be_joined_is_told(name: str) -> None:
    trees, message = UNLIKE[name]
    with pytest.raises(ModelError, match=f"Outputs are joined.*{message}"):
        concatenate(trees)


def test_a_record_keeps_what_its_class_computes() -> None:
    joined = concatenate([Record(ONE, {"b": TWO}), Record(TWO, {"b": ONE})])
    assert joined.left.tolist() == [1.0, 2.0]
    assert joined.right["b"].tolist() == [2.0, 1.0]
    assert joined.made == 1
