"""Metrics of several ranks, joined, are the metric of all samples."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics import Metric

from lockstep.errors import OptionError
from lockstep.train.metrics import Metrics

CLASSES = 4
NUM_SAMPLES = 30


def make_samples(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(NUM_SAMPLES, CLASSES, generator=generator, dtype=torch.float64).softmax(1)
    classes = torch.randint(CLASSES, (NUM_SAMPLES,), generator=generator)
    if name in OF_NUMBERS:
        return scores[:, 1].contiguous(), (classes == 1).double()
    return scores, classes


class Confidence(torchmetrics.MeanMetric):
    """The mean of the largest score: a mean that knows nothing of targets."""

    def update(self, output: Tensor, target: Tensor) -> None:  # type: ignore[override]
        super().update(output.max(1).values)


class Extremes(Metric):
    """States that are joined by maximum, minimum and mean, or not at all."""

    largest: Tensor
    smallest: Tensor
    level: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("smallest", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("level", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("kept", torch.tensor(0.0), dist_reduce_fx=None)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.largest = torch.maximum(self.largest, output.max().float())
        self.smallest = torch.minimum(self.smallest, output.min().float())
        self.level = torch.tensor(3.5)  # as a data range, known once there is data
        self.kept = self.kept + output.sum().float()

    def compute(self) -> Tensor:
        return torch.stack([self.largest, self.smallest, self.level, self.kept.sum()])


def classwise() -> Metric:
    return torchmetrics.ClasswiseWrapper(
        torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, average=None)
    )


def combined() -> Metric:
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
    return 1 - accuracy + torchmetrics.Recall(task="multiclass", num_classes=CLASSES)


METRICS: dict[str, Callable[[], Metric]] = {
    "accuracy": lambda: torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES),
    "per class": lambda: torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average=None),
    "matrix": lambda: torchmetrics.ConfusionMatrix(task="multiclass", num_classes=CLASSES),
    "auroc, all scores kept": lambda: torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
    "auroc, in bins": lambda: torchmetrics.AUROC(
        task="multiclass", num_classes=CLASSES, thresholds=20
    ),
    "squared error": torchmetrics.MeanSquaredError,
    "correlation": torchmetrics.PearsonCorrCoef,
    "explained variance": torchmetrics.ExplainedVariance,
    "mean": Confidence,
    "extremes": Extremes,
    "wrapped": classwise,
    "combined": combined,
}

# Compare numbers with numbers; the others compare scores with classes.
OF_NUMBERS = {"squared error", "correlation", "explained variance"}

# Where the samples are cut into the ranks' shares, in updates of at most five.
RANKS: dict[str, list[tuple[int, int]]] = {
    "one": [(0, 30)],
    "two": [(0, 17), (17, 30)],
    "three": [(0, 10), (10, 11), (11, 30)],
    "the last idle": [(0, 17), (17, 30), (30, 30)],
    "the first idle": [(0, 0), (0, 17), (17, 30)],
    "two idle": [(0, 0), (0, 0), (0, 30)],
}


def update(metrics: Metrics, samples: tuple[Tensor, Tensor], start: int, stop: int) -> None:
    for low in range(start, stop, 5):
        high = min(low + 5, stop)
        metrics.update(samples[0][low:high], samples[1][low:high])


def run_ranks(metrics: Metrics, bounds: list[tuple[int, int]]) -> None:
    """Every rank sees its samples; the first takes over the states of all."""
    samples = make_samples(next(iter(metrics.by_name), ""))
    ranks = [metrics, *(copy.deepcopy(metrics) for _ in bounds[1:])]
    for rank, (start, stop) in zip(ranks, bounds, strict=True):
        rank.reset()
        update(rank, samples, start, stop)
    metrics.merge([rank.states() for rank in ranks])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", METRICS)
def test_joined_metrics_are_the_metric_of_all_samples(name: str, ranks: str) -> None:
    metrics = Metrics({name: METRICS[name]()})
    run_ranks(metrics, RANKS[ranks])
    alone = Metrics({name: METRICS[name]()})
    update(alone, make_samples(name), 0, NUM_SAMPLES)
    expected, found = alone.values()[name], metrics.values()[name]
    torch.testing.assert_close(torch_like(found), torch_like(expected), rtol=1e-5, atol=1e-6)


def torch_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: torch_like(part) for key, part in value.items()}
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("name", METRICS)
def test_an_epoch_after_a_merge_starts_anew(name: str) -> None:
    metrics = Metrics({name: METRICS[name]()})
    run_ranks(metrics, RANKS["three"])
    first = metrics.values()
    run_ranks(metrics, RANKS["three"])
    assert metrics.values() == first


def test_a_metric_follows_the_outputs_to_their_device() -> None:
    """And what other ranks tell, in host memory, is joined there."""
    metric = torchmetrics.MeanSquaredError()
    metrics, other = Metrics({"error": metric}), Metrics({"error": torchmetrics.MeanSquaredError()})
    metrics.update(torch.ones(3, device="meta"), torch.ones(3, device="meta"))
    other.update(torch.ones(3), torch.zeros(3))
    assert metric.sum_squared_error.device.type == "meta"
    metrics.reset()
    metrics.merge(2 * [other.states()])
    assert metric.sum_squared_error.device.type == "meta"


def test_each_of_several_metrics_has_its_own_states() -> None:
    made = {name: METRICS[name]() for name in ("accuracy", "wrapped", "mean")}
    metrics = Metrics(made)
    run_ranks(metrics, RANKS["two"])
    together = metrics.values()
    for name in made:
        alone = Metrics({name: METRICS[name]()})
        run_ranks(alone, RANKS["two"])
        assert together[name] == alone.values()[name]


def test_one_ranks_states_stay_as_they_are() -> None:
    extremes = Extremes()
    for ranks in ("one", "two idle"):
        run_ranks(Metrics({"extremes": extremes}), RANKS[ranks])
        assert extremes.kept.shape == ()


def test_what_was_computed_before_a_merge_is_forgotten() -> None:
    first, second = (Metrics({"accuracy": METRICS["accuracy"]()}) for _ in range(2))
    samples = make_samples("accuracy")
    update(first, samples, 0, 7)
    update(second, samples, 7, NUM_SAMPLES)
    before = first.values()
    first.merge([first.states(), second.states()])
    assert first.values() != before


def test_the_users_own_metric_holds_the_result() -> None:
    accuracy = METRICS["accuracy"]()
    metrics = Metrics({"accuracy": accuracy})
    run_ranks(metrics, RANKS["two"])
    assert accuracy.compute().item() == metrics.values()["accuracy"]
    assert accuracy.update_count == 4 + 3


# --- small outputs, which are counted several at a time ------------------------------------------

COUNTED = ["accuracy", "per class", "matrix"]


def watch_updates(metric: Metric, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of samples of each update to come."""
    sizes: list[int] = []
    update_metric = metric.update

    def watched(output: Tensor, target: Tensor) -> None:
        sizes.append(len(output))
        update_metric(output, target)

    monkeypatch.setattr(metric, "update", watched)
    return sizes


@pytest.mark.parametrize("name", METRICS)
def test_only_plain_counts_wait_for_more_samples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = METRICS[name]()
    sizes, metrics = watch_updates(made, monkeypatch), Metrics({name: made})
    update(metrics, make_samples(name), 0, 20)
    counted = len(sizes)
    metrics.states()
    assert counted == (0 if name in COUNTED else 4)
    assert sizes == ([20] if name in COUNTED else [5] * 4)
    if name in COUNTED:
        assert made.update_count == 4


def test_what_waits_is_counted_as_it_was() -> None:
    """The memory of outputs and targets may be used again at once."""
    scores, classes = make_samples("accuracy")
    metrics, expected = (Metrics({"accuracy": METRICS["accuracy"]()}) for _ in range(2))
    for start in range(0, NUM_SAMPLES, 6):
        output, target = scores[start : start + 6].clone(), classes[start : start + 6].clone()
        expected.by_name["accuracy"].update(output, target)
        metrics.update(output, target)
        output.zero_()
        target.zero_()
    metrics.states()
    assert metrics.values() == expected.values()


def test_not_many_wait_and_none_beyond_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = METRICS["accuracy"]()
    sizes, metrics = watch_updates(accuracy, monkeypatch), Metrics({"accuracy": accuracy})
    scores, classes = make_samples("accuracy")
    for _ in range(50):
        metrics.update(scores[:3], classes[:3])
    assert sizes == [32 * 3]
    metrics.reset()
    metrics.states()
    assert sizes == [32 * 3]
    assert accuracy.update_count == 0


def test_what_is_large_or_of_another_form_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = METRICS["accuracy"]()
    sizes, metrics = watch_updates(accuracy, monkeypatch), Metrics({"accuracy": accuracy})
    scores, classes = make_samples("accuracy")
    metrics.update(scores, classes)
    metrics.update(scores.float(), classes)  # those of another type come first
    assert sizes == [30]
    metrics.update(scores.repeat(200, 1), classes.repeat(200))
    assert sizes == [30, 30, 6000]
    metrics.update(scores.argmax(1), classes)  # classes in place of scores
    assert sizes == [30, 30, 6000, 30]
    metrics.update(scores[:, :, None].expand(-1, -1, 2), classes[:, None].expand(-1, 2))
    assert sizes == [30, 30, 6000, 30, 30]


class Careful(torchmetrics.classification.MulticlassAccuracy):
    """A subclass may look at each update by itself."""


def test_a_subclass_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    careful = Careful(num_classes=CLASSES)
    sizes, metrics = watch_updates(careful, monkeypatch), Metrics({"careful": careful})
    update(metrics, make_samples("accuracy"), 0, 10)
    assert sizes == [5, 5]


# --- what comes out and what may go in ------------------------------------------------------------


def test_values_are_plain_numbers_lists_and_dicts() -> None:
    metrics = Metrics({name: METRICS[name]() for name in ("accuracy", "per class", "wrapped")})
    run_ranks(metrics, RANKS["two"])
    values = metrics.values()
    assert type(values["accuracy"]) is float
    assert [type(one) for one in values["per class"]] == [float] * CLASSES
    assert {type(one) for one in values["wrapped"].values()} == {float}


def test_a_metric_that_saw_nothing_has_no_value() -> None:
    metrics = Metrics({"accuracy": METRICS["accuracy"]()})
    run_ranks(metrics, [(0, 0), (0, 0)])
    assert metrics.values() == {}


@pytest.mark.parametrize("given", [None, {}])
def test_no_metrics_are_false(given: Any) -> None:
    assert not Metrics(given)
    assert Metrics(given).states() == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a function": ({"accuracy": lambda output, target: 1.0}, "torchmetrics.Metric.*function"),
    "a class": ({"mean": torchmetrics.MeanMetric}, "Received: ABCMeta"),
    "a collection": (
        {"all": torchmetrics.MetricCollection([torchmetrics.MeanMetric()])},
        "Received: MetricCollection",
    ),
    "a name that is taken": ({"loss": torchmetrics.MeanMetric()}, "'loss'"),
    "a name of validation": ({"val_mean": torchmetrics.MeanMetric()}, "'val_mean'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_metric_is_refused_by_name(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(OptionError, match=message):
        Metrics(given)
