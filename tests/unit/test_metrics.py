"""Metrics of several ranks, joined, are the metric of all samples."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics import Metric, classification, wrappers
from torchmetrics.text import Perplexity

from lockstep.checkpoint.trees import flattened
from lockstep.errors import ModelError, OptionError
from lockstep.parallel.batch_run import ShareOutput
from lockstep.parallel.exchange.control import Control, SoloControl
from lockstep.train.checkpointing.training_state import copied
from lockstep.train.logging import metric_kinds
from lockstep.train.logging.metrics import Metrics

CLASSES = 4
NUM_SAMPLES = 30


def make_samples(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(NUM_SAMPLES, CLASSES, generator=generator, dtype=torch.float64).softmax(1)
    classes = torch.randint(CLASSES, (NUM_SAMPLES,), generator=generator)
    if name == "for each output":
        return scores[:, :1].contiguous(), (classes[:, None] == 0).double()
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


# These count no updates of their own.
WRAPPERS: dict[str, Callable[[], Metric]] = {
    "extremes of values": lambda: wrappers.MinMaxMetric(torchmetrics.MeanSquaredError()),
    "a window": lambda: wrappers.Running(torchmetrics.MeanSquaredError(), 2),
    "resampled": lambda: wrappers.BootStrapper(torchmetrics.MeanSquaredError()),
    "for each output": lambda: wrappers.MultioutputWrapper(torchmetrics.MeanSquaredError(), 1),
    "a sum": lambda: torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError(),
}

METRICS: dict[str, Callable[[], Metric]] = {
    "accuracy": lambda: torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES),
    "per class": lambda: torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average=None),
    "matrix": lambda: torchmetrics.ConfusionMatrix(task="multiclass", num_classes=CLASSES),
    "auroc, all scores kept": lambda: torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
    "auroc, in bins": lambda: torchmetrics.AUROC(
        task="multiclass", num_classes=CLASSES, thresholds=20
    ),
    "squared error": torchmetrics.MeanSquaredError,
    "absolute error": torchmetrics.MeanAbsoluteError,
    "correlation": torchmetrics.PearsonCorrCoef,
    "explained variance": torchmetrics.ExplainedVariance,
    "mean": Confidence,
    "extremes": Extremes,
    "wrapped": classwise,
    "combined": combined,
}

# Compare numbers with numbers; the others compare scores with classes.
OF_NUMBERS = {"squared error", "absolute error", "correlation", "explained variance", *WRAPPERS}

# Where the samples of a batch are cut into shares, one for each rank.
RANKS: dict[str, list[int]] = {
    "one": [0, 10],
    "two": [0, 6, 10],
    "three": [0, 4, 5, 10],
    "the last idle": [0, 6, 10, 10],
    "the first idle": [0, 0, 6, 10],
    "two idle": [0, 0, 0, 10],
}
BATCH = 10


class Told(Control):
    """To ranks that run one after the other in this process, the first last."""

    def __init__(self, rank: int, messages: list[list[Any]]) -> None:
        self.rank, self.num_ranks = rank, len(messages)
        self._messages = messages

    def broadcast(self, obj: Any) -> Any:
        return 1  # every batch is told

    def gather(self, obj: Any) -> list[Any]:
        self._messages[self.rank].append(obj)
        return [] if self.rank else [told.pop(0) for told in self._messages]

    def share(self, region: Any) -> Any:
        raise NotImplementedError


def controls(num_ranks: int) -> list[Told]:
    messages: list[list[Any]] = [[] for _ in range(num_ranks)]
    return [Told(rank, messages) for rank in range(num_ranks)]


def share_of(samples: tuple[Tensor, Tensor], start: int, stop: int, share: int = 0) -> ShareOutput:
    output, target = (part[start:stop] for part in samples)
    return ShareOutput(
        step=None, share=share, num_samples=stop - start, output=output, target=target
    )


def update(metrics: Metrics, samples: tuple[Tensor, Tensor], start: int, stop: int) -> None:
    """On one rank, batches of at most five."""
    for low in range(start, stop, 5):
        metrics.update(share_of(samples, low, min(low + 5, stop)))
        metrics.settle(SoloControl())


def run_ranks(metrics: Metrics, bounds: list[int]) -> None:
    """Every rank sees its share of each batch; the first gets the values of all."""
    samples = make_samples(next(iter(metrics.by_name), ""))
    ends = controls(len(bounds) - 1)
    ranks = [metrics, *(copy.deepcopy(metrics) for _ in ends[1:])]
    for rank in ranks:
        rank.reset()
    for first in range(0, NUM_SAMPLES, BATCH):
        for number, (rank, control) in reversed([*enumerate(zip(ranks, ends, strict=True))]):
            start, stop = bounds[number], bounds[number + 1]
            if start < stop:
                rank.update(share_of(samples, first + start, first + stop, number))
            rank.settle(control)
    for rank, control in reversed([*zip(ranks, ends, strict=True)]):
        rank.join(control)


def plain_value(name: str, size: int = BATCH) -> Any:
    """What a plain loop finds."""
    metric, samples = METRICS[name](), make_samples(name)
    for start in range(0, NUM_SAMPLES, size):
        metric.update(*(part[start : start + size] for part in samples))
    return metric.compute()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", METRICS)
def test_joined_metrics_are_those_of_a_plain_loop(name: str, ranks: str) -> None:
    metrics = Metrics({name: METRICS[name]()})
    run_ranks(metrics, RANKS[ranks])
    found = torch_like(metrics.values()[name])
    torch.testing.assert_close(found, torch_like(plain_value(name)), rtol=1e-12, atol=1e-12)


def torch_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: torch_like(part) for key, part in value.items()}
    return torch.as_tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("name", METRICS)
def test_an_epoch_after_a_merge_starts_anew(name: str) -> None:
    metrics = Metrics({name: METRICS[name]()})
    run_ranks(metrics, RANKS["three"])
    first = metrics.values()
    run_ranks(metrics, RANKS["three"])
    assert metrics.values() == first


def test_a_metric_follows_the_outputs_to_their_device() -> None:
    """And what other ranks tell, in host memory, is joined there."""
    metric = METRICS["accuracy"]()
    metrics, other = Metrics({"accuracy": metric}), Metrics({"accuracy": METRICS["accuracy"]()})
    scores, classes = make_samples("accuracy")
    metrics.update(share_of((scores.to("meta"), classes.to("meta")), 0, 9))
    metrics._count_waiting()
    assert metric.tp.device.type == "meta"
    metrics.reset()
    metrics._set_counts(2 * [other._counts()])
    assert metric.tp.device.type == "meta"


def test_each_of_several_metrics_has_its_own_states() -> None:
    made = {name: METRICS[name]() for name in ("accuracy", "wrapped", "mean")}
    metrics = Metrics(made)
    run_ranks(metrics, RANKS["two"])
    together = metrics.values()
    for name in made:
        alone = Metrics({name: METRICS[name]()})
        run_ranks(alone, RANKS["two"])
        assert together[name] == alone.values()[name]


def test_the_users_own_metric_holds_the_result() -> None:
    accuracy, error = METRICS["accuracy"](), METRICS["mean"]()
    metrics = Metrics({"accuracy": accuracy, "error": error})
    run_ranks(metrics, RANKS["two"])
    assert accuracy.compute().item() == metrics.values()["accuracy"]
    assert error.compute().item() == metrics.values()["error"]
    assert accuracy.update_count == 2 * 3
    assert error.update_count == 3


@pytest.mark.parametrize("name", [*METRICS, *WRAPPERS])
def test_a_training_goes_on_from_states(name: str) -> None:
    """On other numbers of ranks, too."""
    made = {**METRICS, **WRAPPERS}[name]
    samples = make_samples(name)
    whole, first, second = (Metrics({name: made()}) for _ in range(3))
    update(whole, samples, 0, 30)
    update(first, samples, 0, 15)
    states = first.states(SoloControl())
    flattened({"states": states})  # as files have it
    second.go_on_from(copied(states), controls(2)[0])
    second._num_batches = 3
    update(second, samples, 15, 30)
    assert repr(second.values()) == repr(whole.values())


# --- what may be updated with parts of a batch ----------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"average": "micro"},
    {"average": "weighted", "top_k": 2},
    {"average": None, "ignore_index": 1},
    {"average": "micro", "ignore_index": -1},
]


def counters() -> list[Metric]:
    made = []
    for name in metric_kinds._COUNTERS:
        kind = getattr(classification, f"Multiclass{name}")
        needed = {"num_classes": CLASSES} | ({"beta": 0.5} if name == "FBetaScore" else {})
        for options in OPTIONS:
            try:
                made.append(kind(**needed, **options))
            except (TypeError, ValueError):  # has no such option
                assert options
    return made


def sums() -> list[Metric]:
    kinds = [name.split(".") for name in metric_kinds._SUMS]
    return [getattr(getattr(torchmetrics, module), name)() for module, name in kinds] + [
        torchmetrics.MeanSquaredError(num_outputs=CLASSES),
        Perplexity(ignore_index=2),
    ]


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("metric", counters(), ids=lambda one: type(one).__name__)
def test_counts_of_samples_are_the_counts_of_a_batch(
    metric: Metric, shape: tuple[int, ...]
) -> None:
    assert metric_kinds.counts_samples(metric)
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(9, CLASSES, *shape, generator=generator)
    classes = torch.randint(CLASSES, (9, *shape), generator=generator)
    assert_adds_up(metric, scores, classes)


@pytest.mark.parametrize("metric", sums(), ids=lambda one: type(one).__name__)
def test_sums_of_samples_are_the_sums_of_a_batch(metric: Metric) -> None:
    assert metric_kinds.sums_samples(metric)
    generator = torch.Generator().manual_seed(1)
    output = torch.rand(9, CLASSES, generator=generator, dtype=torch.float64)
    if isinstance(metric, Perplexity):
        output = torch.randn(9, 3, CLASSES, generator=generator, dtype=torch.float64)
        target = torch.randint(CLASSES, (9, 3), generator=generator)
    else:
        target = torch.rand(9, CLASSES, generator=generator, dtype=torch.float64)
    assert_adds_up(metric.set_dtype(torch.float64), output, target)


def assert_adds_up(metric: Metric, output: Tensor, target: Tensor) -> None:
    """States of all samples are the sum of those of each sample, alone."""
    found = []
    for start, stop in [(0, 9), *((number, number + 1) for number in range(9))]:
        metric.reset()
        metric.update(output[start:stop], target[start:stop])
        found.append({name: getattr(metric, name).clone() for name in metric._defaults})
    for name, whole in found[0].items():
        assert whole.any() or name in ("fp", "fn", "tn")
        torch.testing.assert_close(sum(one[name] for one in found[1:]), whole, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize(
    "metric",
    [
        classification.BinaryAccuracy(),
        classification.MultilabelAccuracy(num_labels=CLASSES),
        classification.MulticlassAUROC(num_classes=CLASSES, thresholds=9),
        classification.MulticlassAccuracy(num_classes=CLASSES, multidim_average="samplewise"),
        Confidence(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_may_look_at_an_update_gets_whole_batches(metric: Metric) -> None:
    assert not metric_kinds.counts_samples(metric)
    assert not metric_kinds.sums_samples(metric)


# --- outputs of other forms ----------------------------------------------------------------------


class Largest(Metric):
    """Of one output among several."""

    largest: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_state("largest", torch.zeros(()), dist_reduce_fx="max")

    def update(self, output: dict[str, Any], target: Tensor) -> None:
        self.largest = torch.maximum(self.largest, output[self.name].sum())

    def compute(self) -> Tensor:
        return self.largest


def outputs_of(share: int) -> dict[str, Any]:
    return {
        "rows": torch.full((2, 3), 1.0 + share),
        "same": torch.tensor(4.0),
        "loss": torch.tensor(1.0 * share),
        "padded": torch.ones(2, 3 + share),
        "prototypes": torch.arange(2.0),
        "repeated": torch.ones(2),
    }


@pytest.mark.parametrize(("name", "value"), [("rows", 18.0), ("same", 4.0), ("repeated", 4.0)])
def test_outputs_are_put_together(name: str, value: float) -> None:
    assert largest_of(name) == value


@pytest.mark.parametrize("name", ["loss", "padded", "prototypes"])
def test_only_what_a_metric_uses_must_go_together(name: str) -> None:
    with pytest.raises(ModelError, match="a row for each sample"):
        largest_of(name)


def largest_of(name: str) -> Any:
    """Of two shares with two samples each."""
    metrics = Metrics({"largest": Largest(name)})
    for share in range(2):
        output, target = outputs_of(share), torch.zeros(2)
        part = ShareOutput(step=None, share=share, num_samples=2, output=output, target=target)
        metrics.update(part)
    metrics.settle(SoloControl())
    return metrics.values()["largest"]


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
    metrics._count_waiting()
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
        metrics.update(share_of((output, target), 0, 6))
        output.zero_()
        target.zero_()
    metrics._count_waiting()
    assert metrics.values() == expected.values()


def test_not_many_wait_and_none_beyond_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = METRICS["accuracy"]()
    sizes, metrics = watch_updates(accuracy, monkeypatch), Metrics({"accuracy": accuracy})
    scores, classes = make_samples("accuracy")
    for _ in range(50):
        metrics.update(share_of((scores, classes), 0, 3))
    assert sizes == [32 * 3]
    metrics.reset()
    metrics._count_waiting()
    assert sizes == [32 * 3]
    assert accuracy.update_count == 0


def test_what_is_large_or_of_another_form_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = METRICS["accuracy"]()
    sizes, metrics = watch_updates(accuracy, monkeypatch), Metrics({"accuracy": accuracy})
    scores, classes = make_samples("accuracy")

    def give(output: Tensor, target: Tensor) -> None:
        metrics.update(share_of((output, target), 0, len(output)))

    give(scores, classes)
    give(scores.float(), classes)  # those of another type come first
    assert sizes == [30]
    give(scores.repeat(200, 1), classes.repeat(200))
    assert sizes == [30, 30, 6000]
    give(scores.argmax(1), classes)  # classes in place of scores
    assert sizes == [30, 30, 6000, 30]
    give(scores[:, :, None].expand(-1, -1, 2), classes[:, None].expand(-1, 2))
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


@pytest.mark.parametrize("name", [*METRICS, *WRAPPERS])
def test_a_metric_that_saw_nothing_is_no_number(name: str) -> None:
    metrics = Metrics({name: {**METRICS, **WRAPPERS}[name]()})
    assert math.isnan(metrics.values()[name])


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_a_wrapper_comes_to_is_there(name: str) -> None:
    metrics = Metrics({name: WRAPPERS[name]()})
    run_ranks(metrics, RANKS["three"])
    alone = Metrics({name: WRAPPERS[name]()})
    run_ranks(alone, RANKS["one"])
    assert repr(metrics.values()) == repr(alone.values())
    assert metrics.values()[name] != 0.0


@pytest.mark.parametrize("given", [None, {}])
def test_no_metrics_are_false(given: Any) -> None:
    assert not Metrics(given)


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
