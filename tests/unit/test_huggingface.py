"""Hugging Face datasets without a format: batches as their own Trainer makes them."""

from typing import Any

import datasets
import pytest
import torch
import transformers
from torch import nn

import lockstep
from lockstep.data.iterable.streams import as_stream
from lockstep.data.map_style.sources import as_source
from lockstep.errors import DataError

pytestmark = pytest.mark.thorough

ROWS: dict[str, list[Any]] = {
    "input_ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 1, 2]],
    "label": [0, 1, 1, 0],
    "text": ["a", "b", "c", "d"],
    "score": [0.5, 1.0, 2.0, 0.25],
    "nothing": [None, None, None, None],
}


def assert_same(found: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    "columns",
    [
        ROWS,
        {"label": [0.5, 1.0, 0.0, 0.0], "x": ROWS["input_ids"]},
        {"label_ids": [[0, 1], [1, 1], [0, 0], [1, 0]], "x": ROWS["input_ids"]},
        {"x": [[[1.0], [2.0]]] * 4, "flag": [True, False, True, False]},
    ],
)
def test_batches_are_those_of_their_own_collator(columns: dict[str, list[Any]]) -> None:
    dataset = datasets.Dataset.from_dict(columns)
    expected = transformers.default_data_collator([dataset[2], dataset[0]])
    for data in (
        dataset,
        torch.utils.data.Subset(dataset, range(4)),
        lockstep.data.prefetch(dataset),
    ):
        batch = as_source(data).read(torch.tensor([2, 0]), None)
        assert_same(batch.inputs, expected)
    stream = as_stream(dataset.to_iterable_dataset(), name="data", batch_size=4)
    assert stream is not None
    (whole,) = (stream.batch(element) for element in stream.begin())
    assert_same(whole.inputs, transformers.default_data_collator(list(dataset)))


def test_a_dataset_with_a_format_stays_what_it_is() -> None:
    dataset = datasets.Dataset.from_dict({"x": [[1.0, 2.0]], "label": [1]}).with_format("torch")
    assert set(as_source(dataset).read(torch.tensor([0]), None).inputs) == {"x", "label"}


def test_rows_of_different_lengths_are_to_be_padded() -> None:
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "label": [0, 1]})
    with pytest.raises(DataError, match=r"same shape in column 'input_ids'.*Pad them"):
        as_source(dataset).read(torch.tensor([0, 1]), None)


class Classifier(nn.Module):
    """Computes its own loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_model_trains_on_them_as_on_tensors() -> None:
    dataset = datasets.Dataset.from_dict({name: ROWS[name] for name in ("input_ids", "label")})
    tensors = {"input_ids": torch.tensor(ROWS["input_ids"]), "labels": torch.tensor(ROWS["label"])}
    weights = []
    for data in (dataset, tensors):
        torch.manual_seed(0)
        trainer = lockstep.Trainer(
            Classifier(),
            loss=lockstep.OwnLoss(),
            optimizer="adam",
            strategy=lockstep.MirroredStrategy(2),
        )
        trainer.fit(data, epochs=2, batch_size=3, verbose=0)
        weights.append(next(trainer.model.parameters()).detach())
    assert torch.equal(*weights)
