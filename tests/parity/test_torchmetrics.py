"""Every class of torchmetrics for classes and numbers, against a plain loop over global batches.

A family of metrics takes outputs and targets of one form, so one ``evaluate`` tries all of it.
Batches have 4 to 33 samples; scores are logits, of which small parts lie between 0 and 1.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import Metric, classification, regression

import lockstep
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

CLASSES = 4
SIZES = [33, 4, 7, 16, 5]
SHARES = 6

ARGUMENTS: dict[str, Any] = {
    "num_classes": CLASSES,
    "num_labels": CLASSES,
    "beta": 2.0,
    "p": 3.0,
    "threshold": 0.5,
    "min_recall": 0.5,
    "min_precision": 0.5,
    "min_sensitivity": 0.5,
    "min_specificity": 0.5,
}
# These take a third argument in ``update``.
LEFT_OUT = {"BinaryFairness", "BinaryGroupStatRates"}
OF_DISTRIBUTIONS = {"JensenShannonDivergence", "KLDivergence", "CosineSimilarity"}
OF_ENSEMBLES = {"ContinuousRankedProbabilityScore"}


class Head(nn.Module):
    """What a family has for outputs."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, scores: Tensor) -> Tensor:
        if self.form == "binary":
            return scores[:, 0]
        if self.form == "numbers":
            return nn.functional.softplus(scores[:, 0])
        return scores.softmax(1) if self.form == "distributions" else scores


@dataclass(frozen=True)
class Family:
    """Metrics, and what their targets are, made of uniform numbers of shape (n, classes)."""

    names: tuple[str, ...]
    targets: Callable[[Tensor], Tensor]

    def metrics(self) -> dict[str, Metric]:
        return {name: make(name) for name in self.names}


def make(name: str) -> Metric:
    made = getattr(classification, name, None) or getattr(regression, name)
    code = made.__init__.__code__
    wanted = set(code.co_varnames[: code.co_argcount]) & set(ARGUMENTS)
    if name.startswith("Bin") or "Multilabel" in name:
        wanted.discard("threshold")  # they have a default
    return made(**{key: ARGUMENTS[key] for key in wanted})  # type: ignore[no-any-return]


def of_kind(kind: str) -> tuple[str, ...]:
    found = [name for name in dir(classification) if name.startswith(kind)]
    return tuple(name for name in found if name not in LEFT_OUT)


FAMILIES = {
    "binary": Family(of_kind("Binary"), lambda some: (some[:, 0] > 0.4).long()),
    "multiclass": Family(of_kind("Multiclass"), lambda some: some.argmax(1)),
    "multilabel": Family(of_kind("Multilabel"), lambda some: (some > 0.4).long()),
    "numbers": Family(
        tuple(sorted({*regression.__all__} - OF_DISTRIBUTIONS - OF_ENSEMBLES)),
        lambda some: some[:, 0] + 0.1,
    ),
    "distributions": Family(
        tuple(sorted(OF_DISTRIBUTIONS)), lambda some: some / some.sum(1, keepdim=True)
    ),
    "ensembles": Family(tuple(OF_ENSEMBLES), lambda some: some[:, 0]),
}
FAMILIES["binary probabilities"] = FAMILIES["binary"]

STRATEGIES: dict[str, Callable[[], Any]] = {
    "1": lambda: lockstep.MirroredStrategy(1, num_shares=SHARES),
    "2": lambda: lockstep.MirroredStrategy(2, num_shares=SHARES),
    "3": lambda: lockstep.MirroredStrategy(3, num_shares=SHARES),
    "2 stages": lambda: lockstep.PipelineStrategy(cuts=["1"], microbatches=SHARES),
    "gloo": lambda: lockstep.MirroredStrategy(2, num_shares=SHARES, engine="gloo"),
}
# Their shares are others, and so are the last bits of sums.
OTHER_SHARES: dict[str, Callable[[], Any]] = {
    "3, a share each": lambda: lockstep.MirroredStrategy(3),
    "servers": lambda: lockstep.ParameterServerStrategy(servers=1, workers=2),
}


def batches(name: str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for size in SIZES:
        scores = torch.randn(size, CLASSES, generator=generator, dtype=torch.float64)
        scores[size // 2 :] = scores[size // 2 :].sigmoid()
        some = torch.rand(size, CLASSES, generator=generator, dtype=torch.float64)
        yield scores.sigmoid() if "prob" in name else scores, FAMILIES[name].targets(some)


def make_model(name: str) -> nn.Sequential:
    layers = [nn.Linear(CLASSES, CLASSES) for _ in range(2)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(CLASSES))
            layer.bias.zero_()
    return nn.Sequential(*layers, Head(name.split()[0])).double()


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """The plain loop's values."""
    model, metrics = make_model(name).eval(), FAMILIES[name].metrics()
    with torch.no_grad():
        for inputs, targets in batches(name):
            outputs = model(inputs)
            for metric in metrics.values():
                metric.update(outputs, targets)
    return {key: plain(metric.compute()) for key, metric in metrics.items()}


@functools.cache
def evaluated(name: str, strategy: str) -> dict[str, Any]:
    trainer = lockstep.Trainer(
        make_model(name),
        loss=lambda output, target: output.reshape(len(output), -1).mean(1),
        metrics=FAMILIES[name].metrics(),
        strategy={**STRATEGIES, **OTHER_SHARES}[strategy](),
        precision="fp64",
    )
    return trainer.evaluate(functools.partial(batches, name))


def assert_close(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert_close([*found.items()], [*wanted.items()])
    elif isinstance(wanted, str):
        assert found == wanted
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    else:
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12, nan_ok=True)


@pytest.mark.filterwarnings("ignore")  # of torchmetrics, on memory and on single samples
@pytest.mark.parametrize("strategy", core_of([*STRATEGIES, *OTHER_SHARES], ["2", "2 stages"]))
@pytest.mark.parametrize("name", FAMILIES)
def test_metrics_are_those_of_a_plain_loop(name: str, strategy: str) -> None:
    found = evaluated(name, strategy)
    for key, value in expected(name).items():
        assert_close(found[key], value)
    if strategy in STRATEGIES:
        assert repr(found) == repr(evaluated(name, "1"))  # every bit, NaN included


def test_hardly_a_class_is_left_out() -> None:
    assert sum(len(family.names) for family in FAMILIES.values()) > 100


# --- training ------------------------------------------------------------------------------------


class Batches(Metric):
    """Looks at each update: how many samples there are, and what the largest output is."""

    sizes: list[Tensor]
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sizes", [], dist_reduce_fx="cat")
        self.add_state("largest", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.sizes.append(torch.tensor([len(output)]))
        self.largest = self.largest + output.max()

    def compute(self) -> Tensor:
        return torch.cat([self.largest[None], *self.sizes])


def watching() -> dict[str, Metric]:
    wrappers = torchmetrics.wrappers
    return {
        "batches": Batches(),
        "auroc": classification.BinaryAUROC(),
        "mae": regression.MeanAbsoluteError(),
        "extremes": wrappers.MinMaxMetric(regression.MeanSquaredError()),
        "window": wrappers.Running(regression.R2Score(), 3),
        "resampled": wrappers.BootStrapper(regression.MeanSquaredError()),
        "sum": regression.MeanSquaredError() + regression.MeanAbsoluteError(),
    }


X = torch.randn(50, CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
Y = (X[:, 0] > 0.2).long()
DATA, VALIDATION, EPOCHS = (X, Y), (X[:31] + 0.3, Y[:31]), 2


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def trained(strategy: Any) -> dict[str, Any]:
    model = make_model("binary")
    trainer = lockstep.Trainer(
        model,
        loss=squares,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05),
        metrics=watching(),
        strategy=strategy,
        precision="fp64",
    )
    options: dict[str, Any] = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    return trainer.fit(DATA, batch_size=13, validation_data=VALIDATION, **options).history


def looped() -> dict[str, Any]:
    """The same in a plain loop, but for what ``BootStrapper`` draws."""
    model, history = make_model("binary"), dict[str, Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    metrics = {"": watching(), "val_": watching()}
    for _ in range(EPOCHS):
        for prefix, data in (("", DATA), ("val_", VALIDATION)):
            for metric in metrics[prefix].values():
                metric.reset()
            for inputs, targets in zip(*(part.split(13) for part in data), strict=True):
                output = model(inputs)
                for metric in metrics[prefix].values():
                    metric.update(output.detach(), targets)
                if not prefix:
                    optimizer.zero_grad()
                    squares(output, targets).mean().backward()
                    optimizer.step()
            for name, metric in metrics[prefix].items():
                history.setdefault(prefix + name, []).append(plain(metric.compute()))
    return history


TRAINED = core_of([*STRATEGIES, *OTHER_SHARES], ["2", "2 stages"])


@functools.cache
def trained_alone() -> dict[str, Any]:
    return trained(STRATEGIES["1"]())


@pytest.mark.parametrize("strategy", TRAINED)
def test_metrics_of_training_and_validation_are_those_of_a_plain_loop(strategy: str) -> None:
    history = trained({**STRATEGIES, **OTHER_SHARES}[strategy]())
    for name, values in looped().items():
        if "resampled" not in name:
            assert_close(history[name], values)
    for name in ("resampled", "val_resampled"):  # drawn alike, whatever the devices
        found = history[name]
        assert_close(
            [each["mean"] for each in found], [each["mean"] for each in trained_alone()[name]]
        )
        assert all(each["std"] > 0 for each in found)
    if strategy in STRATEGIES:
        assert repr(history["mae"]) == repr(trained_alone()["mae"])
        assert repr(history["val_mae"]) == repr(trained_alone()["val_mae"])


APART: dict[str, Callable[[], Any]] = {
    "averaging": lambda: lockstep.LocalSGDStrategy(every=3, devices=2),
    "servers": lambda: lockstep.ParameterServerStrategy(servers=1, workers=2, staleness=1),
}


@pytest.mark.parametrize("strategy", APART)
def test_replicas_that_train_apart_see_whole_batches(strategy: str) -> None:
    history = trained(APART[strategy]())
    for _, *sizes in [*history["batches"], *history["val_batches"]]:
        assert sizes in ([13, 13, 13, 11], [13, 13, 5])
    assert not any(math.isnan(each) for each in history["mae"] + history["auroc"])
