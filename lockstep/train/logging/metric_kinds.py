"""Which torchmetrics may be updated with a part of a batch.

An update may depend on all its values: ``BinaryAccuracy`` decides by the values of a whole update
whether they are logits. So metrics get whole batches, except those of the lists below: their update
adds a value of each sample to every state, and depends on nothing else than shapes, dtypes and
ranges of labels. They are recognised by exact class, since a subclass may do anything;
``tests/unit/test_metrics.py`` tests each of them.
"""

from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torchmetrics import Metric

# Metrics of more than two classes, whose states are integer counts.
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

# Metrics whose states are sums of floating point numbers, and their number.
_SUMS = (
    "regression.MeanAbsoluteError",
    "regression.MeanAbsolutePercentageError",
    "regression.MeanSquaredError",
    "regression.MeanSquaredLogError",
    "text.Perplexity",
)


def is_metric(value: object) -> "TypeGuard[Metric]":
    """True for a torchmetrics metric."""
    # torchmetrics takes as long to import as torch, so it is imported only if used.
    from torchmetrics import Metric

    return isinstance(value, Metric)


def is_collection(value: object) -> bool:
    """True for a torchmetrics collection."""
    from torchmetrics import MetricCollection

    return isinstance(value, MetricCollection)


def parts_of(metric: "Metric") -> "list[Metric]":
    """The metric, and those that it wraps or combines, which hold the states."""
    return [part for part in metric.modules() if is_metric(part)]


def keeps_samples(metric: "Metric") -> bool:
    """True if its states are lists, which grow with the number of samples."""
    states = [state for part in parts_of(metric) for state in part._defaults.values()]
    return any(isinstance(state, list) for state in states)


def counts_samples(metric: Any) -> bool:
    """True if it counts predictions by class."""
    from torchmetrics import classification

    from lockstep.train.logging.binary_accuracy import BinaryAccuracy

    kinds = [getattr(classification, f"Multiclass{name}") for name in _COUNTERS]
    kinds.append(BinaryAccuracy)  # it does not guess whether outputs are logits
    return type(metric) in kinds and getattr(metric, "multidim_average", "global") == "global"


def sums_samples(metric: Any) -> bool:
    """True if it sums a number of each sample."""
    import torchmetrics

    places = [name.split(".") for name in _SUMS]
    kinds = [getattr(getattr(torchmetrics, module), name) for module, name in places]
    return type(metric) in kinds
