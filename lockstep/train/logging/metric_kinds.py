"""Which torchmetrics may be updated with a part of a batch.

An update may look at all that it gets: ``BinaryAccuracy`` decides by the values of a whole update
whether they are logits. So metrics get whole batches, but for those of the lists below: their
update adds a value of each sample to every state, and looks at nothing else than shapes, dtypes and
ranges of labels. They are known by exact class, since a subclass may do anything; and
``tests/unit/test_metrics.py`` tries each of them.
"""

from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torchmetrics import Metric

# Those of more than two classes: their states are counts, in whole numbers.
_COUNTERS = (
    "Accuracy",
    "CohenKappa",
    "ConfusionMatrix",
    "F1Score",
    "FBetaScore",
    "HammingDistance",
    "JaccardIndex",
    "MatthewsCorrCoef",
    "NegativePredictiveValue",
    "Precision",
    "Recall",
    "Specificity",
    "StatScores",
)

# Their states are sums of floating point numbers, and how many there are of them.
_SUMS = (
    "regression.MeanAbsoluteError",
    "regression.MeanAbsolutePercentageError",
    "regression.MeanSquaredError",
    "regression.MeanSquaredLogError",
    "text.Perplexity",
)


def is_metric(value: object) -> "TypeGuard[Metric]":
    """Whether it is one of torchmetrics."""
    # torchmetrics takes as long to import as torch: only those wait who use it.
    from torchmetrics import Metric

    return isinstance(value, Metric)


def is_collection(value: object) -> bool:
    """Whether it is several of torchmetrics in one object."""
    from torchmetrics import MetricCollection

    return isinstance(value, MetricCollection)


def parts_of(metric: "Metric") -> "list[Metric]":
    """The metric, and those that it wraps or combines: they hold the states then."""
    return [part for part in metric.modules() if is_metric(part)]


def keeps_samples(metric: "Metric") -> bool:
    """Whether it has lists for states, which grow with what it has seen."""
    states = [state for part in parts_of(metric) for state in part._defaults.values()]
    return any(isinstance(state, list) for state in states)


def counts_samples(metric: Any) -> bool:
    """Whether it counts what samples are taken for, class by class."""
    from torchmetrics import classification

    from lockstep.train.logging.binary_accuracy import BinaryAccuracy

    kinds = [getattr(classification, f"Multiclass{name}") for name in _COUNTERS]
    kinds.append(BinaryAccuracy)  # it knows what outputs are
    return type(metric) in kinds and getattr(metric, "multidim_average", "global") == "global"


def sums_samples(metric: Any) -> bool:
    """Whether it adds up a number of each sample."""
    import torchmetrics

    places = [name.split(".") for name in _SUMS]
    kinds = [getattr(getattr(torchmetrics, module), name) for module, name in places]
    return type(metric) in kinds
