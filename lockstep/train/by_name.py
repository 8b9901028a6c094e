"""Optimizers, losses and metrics by name, as Keras users write them.

Names are those of torch (``torch.optim``, ``torch.nn.functional``), and those of Keras that mean
the same.
"""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch.nn.functional as F
from torch import nn, optim

from lockstep.errors import OptionError
from lockstep.formatting import listed
from lockstep.parallel.loss.torch_losses import ClassLoss

_LOSSES: dict[str, Callable[[], nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "nll": nn.NLLLoss,
    "mse": nn.MSELoss,
    "mean_squared_error": nn.MSELoss,
    "l1": nn.L1Loss,
    "mae": nn.L1Loss,
    "mean_absolute_error": nn.L1Loss,
    "smooth_l1": nn.SmoothL1Loss,
    "huber": nn.HuberLoss,
    "bce": nn.BCELoss,
    "binary_cross_entropy": nn.BCELoss,
    "binary_crossentropy": nn.BCELoss,
    "bce_with_logits": nn.BCEWithLogitsLoss,
    "binary_cross_entropy_with_logits": nn.BCEWithLogitsLoss,
}

# Names that mean something else in Keras: of probabilities, and not of logits.
_OTHERS = {
    "sparse_categorical_crossentropy": "cross_entropy",
    "categorical_crossentropy": "cross_entropy",
}


def loss_named(loss: Any) -> Any:
    """A loss, or several, with names replaced by functions.

    Raises:
        OptionError: an unknown name.
    """
    if isinstance(loss, Mapping):
        return {key: loss_named(one) for key, one in loss.items()}
    if isinstance(loss, list | tuple):
        return [loss_named(one) for one in loss]
    if not isinstance(loss, str):
        return loss
    name = loss.lower().removesuffix("_loss")
    if name in _OTHERS:
        raise OptionError(
            f"Keras's {loss!r} takes probabilities; losses of classes take logits here.",
            received=f"loss={loss!r}",
            fix=f"Use {_OTHERS[name]!r}, on a model without a softmax at its end.",
        )
    return _choose("loss", name, _LOSSES, "an instance: torch.nn.CrossEntropyLoss()")()


def optimizer_named(optimizer: Any) -> Any:
    """An optimizer, or several, with names replaced by torch's classes.

    Raises:
        OptionError: an unknown name.
    """
    if isinstance(optimizer, Mapping):
        return {key: optimizer_named(one) for key, one in optimizer.items()}
    if not isinstance(optimizer, str):
        return optimizer
    kinds = {
        name.lower(): kind
        for name, kind in vars(optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, optim.Optimizer)
        and kind is not optim.Optimizer
    }
    fix = "a class or function: functools.partial(torch.optim.Adam, lr=1e-3)"
    return _choose("optimizer", optimizer.lower(), kinds, fix)


def metrics_named(metrics: Any, loss: Any) -> Any:
    """Metrics by name; those passed as names are made to fit the loss.

    Raises:
        OptionError: an unknown name, or one that does not fit this loss.
    """
    if isinstance(metrics, list | tuple) and all(isinstance(one, str) for one in metrics):
        metrics = {one: one for one in metrics}
    if not isinstance(metrics, Mapping):
        return metrics
    return {
        name: _metric(one, loss) if isinstance(one, str) else one for name, one in metrics.items()
    }


def _metric(name: str, loss: Any) -> Any:
    kinds = {
        "accuracy": _accuracy,
        "acc": _accuracy,
        "mse": _mean_squared_error,
        "mean_squared_error": _mean_squared_error,
        "mae": _mean_absolute_error,
        "mean_absolute_error": _mean_absolute_error,
    }
    fix = 'a metric by name: {"auroc": torchmetrics.classification.BinaryAUROC()}'
    return _choose("metrics", name.lower(), kinds, fix)(loss)


def _accuracy(loss: Any) -> Any:
    """Accuracy over classes, or binary accuracy, as the loss requires.

    Raises:
        OptionError: the loss does not say what the outputs are.
    """
    by_class = ClassLoss.recognise(loss) if callable(loss) else None
    if by_class is not None:
        from torchmetrics.classification import MulticlassAccuracy

        return MulticlassAccuracy(average="micro", ignore_index=by_class.ignore_index)
    forward = getattr(type(loss), "forward", None) if isinstance(loss, nn.Module) else loss
    of_logits = forward in (nn.BCEWithLogitsLoss.forward, F.binary_cross_entropy_with_logits)
    if of_logits or forward in (nn.BCELoss.forward, F.binary_cross_entropy):
        from lockstep.train.logging.binary_accuracy import BinaryAccuracy

        return BinaryAccuracy(of_logits=of_logits)
    raise OptionError(
        "'accuracy' needs one of these losses, to know what it compares: cross_entropy, nll_loss, "
        "or binary_cross_entropy with or without logits.",
        received=f"metrics with 'accuracy' and loss={_said(loss)}",
        fix='Pass the metric: {"accuracy": torchmetrics.classification.MulticlassAccuracy(10, '
        'average="micro")}, or BinaryAccuracy() for outputs that are probabilities.',
    )


def _mean_squared_error(loss: Any) -> Any:
    from torchmetrics import MeanSquaredError

    return MeanSquaredError()


def _mean_absolute_error(loss: Any) -> Any:
    from torchmetrics import MeanAbsoluteError

    return MeanAbsoluteError()


def _said(loss: Any) -> str:
    return "None" if loss is None else getattr(loss, "__name__", type(loss).__name__)


def _choose(argument: str, name: str, known: Mapping[str, Any], otherwise: str) -> Any:
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=1)
    raise OptionError(
        f"`{argument}` does not know this name.",
        received=repr(name),
        fix=(f"Did you mean {near[0]!r}?" if near else f"Names are {listed(known)}.")
        + f" Or pass {otherwise}.",
    )
