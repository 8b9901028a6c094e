"""Random Keras trainings, against plain Keras on one device."""

import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from keras import ops

from tests.fuzz.keras_models import CLASSES, ENTRIES, LAYERS, Make, make_model
from tests.fuzz.running import Outcome, Values, judged, settled, strategy_of
from tests.fuzz.showing import Repr
from tests.keras_zoo import true_float64


@dataclass(frozen=True, kw_only=True, repr=False)
class KerasCase(Repr):
    """A training.

    Attributes:
        entry: kind of the inputs.
        body: names of layers in the shape of the inputs.
        tail: names of layers over vectors.
        style: "functional", "sequential", "subclassed", or "two" inputs and outputs.
        loss: its name.
        optimizer: its name.
        options: of the optimizer.
        weights: "", "sample" or "class" weights.
        metrics: what is measured.
        form: of the data.
        count: samples.
        batch_size: of an update.
        actions: what is done, one after the other.
        strategy: its class.
        layout: its arguments.
        seed: of weights and data.
    """

    entry: str = "vector"
    body: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    style: str = "functional"
    loss: str = "squares"
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    metrics: tuple[str, ...] = ()
    form: str = "arrays"
    count: int = 16
    batch_size: int = 8
    actions: tuple[str, ...] = ("fit",)
    strategy: str = "SingleDeviceStrategy"
    layout: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


# --- losses, metrics, optimizers -----------------------------------------------------------------


def own_squares(target: Any, output: Any) -> Any:
    return ops.mean(ops.square(target - output), axis=-1)


def own_root(target: Any, output: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(target - output)))


LOSSES: dict[str, tuple[str, Make]] = {
    "squares": ("values", lambda: "mse"),
    "absolute": ("values", keras.losses.MeanAbsoluteError),
    "huber": ("values", partial(keras.losses.Huber, 0.5)),
    "squares, summed": ("values", partial(keras.losses.MeanSquaredError, reduction="sum")),
    "squares, mean": ("values", partial(keras.losses.MeanSquaredError, reduction="mean")),
    "logcosh": ("values", keras.losses.LogCosh),
    "cosine": ("values", keras.losses.CosineSimilarity),
    "own squares": ("values", lambda: own_squares),
    "own root": ("values", lambda: own_root),
    "cross entropy": (
        "classes",
        partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True),
    ),
    "cross entropy, ignoring": (
        "classes",
        partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True, ignore_class=1),
    ),
    "cross entropy, smooth": (
        "chances",
        partial(keras.losses.CategoricalCrossentropy, from_logits=True, label_smoothing=0.1),
    ),
    "focal": ("chances", partial(keras.losses.CategoricalFocalCrossentropy, from_logits=True)),
    "binary": ("chances", partial(keras.losses.BinaryCrossentropy, from_logits=True)),
    "dice": ("chances", keras.losses.Dice),
    "hinge": ("signs", keras.losses.SquaredHinge),
}
METRICS: dict[str, Make] = {
    "mae": lambda: "mae",
    "rmse": keras.metrics.RootMeanSquaredError,
    "cosine": keras.metrics.CosineSimilarity,
    "r2": keras.metrics.R2Score,
}
CLASS_METRICS: dict[str, Make] = {
    "accuracy": lambda: "accuracy",
    "top 2": partial(keras.metrics.SparseTopKCategoricalAccuracy, 2),
}
OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
    "Lamb",
    "Adafactor",
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"clipnorm": 0.1},
    {"clipvalue": 0.01},
    {"global_clipnorm": 0.1},
    {"use_ema": True, "ema_momentum": 0.6},
    {"gradient_accumulation_steps": 2},
    {"weight_decay": 0.05},
    {"momentum": 0.9, "nesterov": True},
)


def compile_model(case: KerasCase, model: Any) -> None:
    kind, make_loss = LOSSES[case.loss]
    table = CLASS_METRICS if kind == "classes" else METRICS
    options: dict[str, Any] = {"loss": make_loss()}
    options["metrics"] = [table[name]() for name in case.metrics] or None
    if case.style == "two":
        options["loss"] = {"main": make_loss(), "other": "mse"}
        options["loss_weights"] = {"main": 1.0, "other": 0.3}
        options["metrics"] = {"main": options["metrics"]} if case.metrics else None
    make = getattr(keras.optimizers, case.optimizer)
    model.compile(
        optimizer=make(learning_rate=0.01, **case.options),
        **options,
    )


# --- data ----------------------------------------------------------------------------------------


class KerasData:
    """Samples, mixed within their batches where a number says how."""

    def __init__(self, case: KerasCase, mix: int | None) -> None:
        rng = np.random.default_rng(case.seed)
        shape, kind = ENTRIES[case.entry], LOSSES[case.loss][0]
        self.case = case
        if case.entry == "tokens":
            first: Any = rng.integers(0, 9, (case.count, *shape))
            first[:, 0] = 3  # something of each counts
        else:
            first = rng.normal(size=(case.count, *shape))
        values = rng.normal(size=(case.count, CLASSES))
        match kind:
            case "classes":
                target: Any = rng.integers(0, CLASSES, case.count)
            case "chances":
                target = np.exp(values) / np.exp(values).sum(1, keepdims=True)
            case "signs":
                target = np.sign(values)
            case _:
                target = values
        self.x: Any = {"first": first, "second": rng.normal(size=(case.count, 3))}
        self.y: Any = {"main": target, "other": rng.normal(size=(case.count, 2))}
        if case.style != "two":
            self.x, self.y = first, target
        self.weights = None
        if case.weights == "sample":
            self.weights = rng.integers(1, 4, case.count).astype("float64")
        order = np.arange(case.count)
        if mix is not None:
            own = np.random.default_rng(mix)
            for start in range(0, case.count, case.batch_size):
                own.shuffle(order[start : start + case.batch_size])
        self.x, self.y, self.weights = taken((self.x, self.y, self.weights), order)

    def given(self) -> dict[str, Any]:
        """Arguments of ``fit``."""
        case = self.case
        whole = {"x": self.x, "y": self.y, "sample_weight": self.weights}
        match case.form:
            case "arrays":
                return {**whole, "batch_size": case.batch_size, "shuffle": False}
            case "sequence":
                return {"x": Pieces(self), "shuffle": False}
            case _:
                return {"x": self._walk(), "steps_per_epoch": len(Pieces(self))}

    def batch(self, number: int) -> tuple[Any, ...]:
        size = self.case.batch_size
        own = taken((self.x, self.y, self.weights), slice(number * size, (number + 1) * size))
        return own if self.weights is not None else own[:2]  # type: ignore[no-any-return]

    def _walk(self) -> Iterator[Any]:
        number = 0
        while True:
            yield self.batch(number % len(Pieces(self)))
            number += 1


class Pieces(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, data: KerasData) -> None:
        super().__init__()
        self.data = data

    def __len__(self) -> int:
        return -(-self.data.case.count // self.data.case.batch_size)

    def __getitem__(self, index: int) -> Any:
        return self.data.batch(index)


def taken(tree: Any, rows: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple(taken(one, rows) for one in tree)
    if isinstance(tree, dict):
        return {name: one[rows] for name, one in tree.items()}
    return None if tree is None else tree[rows]


# --- drawing -------------------------------------------------------------------------------------


def draw(seed: int) -> KerasCase:
    rng = random.Random(f"keras {seed}")
    entry = rng.choice([*ENTRIES])
    loss = rng.choice([*LOSSES])
    kind = LOSSES[loss][0]
    table = CLASS_METRICS if kind == "classes" else METRICS
    options = dict(rng.choice(OPTIONS))
    optimizer = "SGD" if "momentum" in options else rng.choice(("SGD", "SGD", *OPTIMIZERS))
    if optimizer == "Lamb":
        options.pop("weight_decay", None)
    strategy, layout = _draw_strategy(rng)

    def names(of: str, most: int) -> tuple[str, ...]:
        return tuple(rng.choice([*LAYERS[of]]) for _ in range(rng.randint(0, most)))

    batch_size = rng.choice((4, 6, 7, 9))
    then = rng.choice(("evaluate", "predict", "batch", "freeze fit", "weights fit")).split()
    case = KerasCase(
        entry=entry,
        body=names(entry, 2),
        tail=names("vector", 2),
        style=rng.choice(("functional", "sequential", "subclassed", "two")),
        loss=loss,
        optimizer=optimizer,
        options=options,
        weights=rng.choice(("", "", "sample", "class")),
        metrics=tuple(rng.sample([*table], rng.randint(0, 2))),
        form=rng.choice(("arrays", "arrays", "sequence", "generator")),
        count=rng.randint(batch_size + 2, 3 * batch_size),
        batch_size=batch_size,
        actions=("fit", *(then if rng.random() < 0.6 else ())),
        strategy=strategy,
        layout=layout,
        seed=seed,
    )
    return _allowed(case)


def _draw_strategy(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return rng.choice(
        (
            ("SingleDeviceStrategy", {}),
            ("MirroredStrategy", {"devices": 2}),
            ("MirroredStrategy", {"devices": 2}),
            ("MirroredStrategy", {"devices": 2, "num_shares": 3}),
            ("MirroredStrategy", {"devices": 3}),
            ("MirroredStrategy", {"devices": 2, "engine": "gloo"}),
            ("PipelineStrategy", {"stages": 2, "microbatches": 1}),
            ("PipelineStrategy", {"stages": 2, "microbatches": 3}),
            ("ParameterServerStrategy", {"servers": 1, "workers": 2}),
        )
    )


def _allowed(case: KerasCase) -> KerasCase:
    """The case, without what is documented as not to be had together."""
    if case.weights == "class" and LOSSES[case.loss][0] != "classes":
        case = replace(case, weights="sample")
    if case.style == "two" and case.weights == "class":
        case = replace(case, weights="")
    if case.loss == "cross entropy, ignoring" and case.style == "two":
        case = replace(case, form="arrays")  # else Keras masks the other output's weights, too
    if case.loss == "dice":  # has no weights for samples
        case = replace(case, weights="")
    if case.loss == "own root":
        case = replace(case, weights="")
    is_piped = case.strategy == "PipelineStrategy"
    if is_piped and "batch norm" in (*case.body, *case.tail):
        case = replace(case, layout={"stages": 2, "microbatches": 1})
    if case.strategy in ("PipelineStrategy", "ParameterServerStrategy"):
        rest = {name: one for name, one in case.options.items() if name != "global_clipnorm"}
        case = replace(case, options=rest)
    return case


# --- running -------------------------------------------------------------------------------------


def values(case: KerasCase, scope: AbstractContextManager[Any], mix: int | None = None) -> Values:
    """What a model is after all actions, and what they have returned."""
    data = KerasData(case, mix)
    found: dict[str, Any] = {}
    with scope:
        model = make_model(case)
        compile_model(case, model)
    given = data.given()
    if case.weights == "class":
        given["class_weight"] = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5}
    for number, action in enumerate(case.actions):
        name = f"{action} {number}"
        match action:
            case "fit":
                history = model.fit(**given, epochs=1, verbose=0).history
                found |= {f"{name} {key}": one for key, one in history.items()}
            case "evaluate":
                told = model.evaluate(
                    data.x, data.y, case.batch_size, verbose=0, sample_weight=data.weights
                )
                found[name] = told
            case "predict":
                inputs = data.x if mix is None else KerasData(case, None).x
                outputs = model.predict(inputs, case.batch_size, verbose=0)
                outputs = outputs if isinstance(outputs, dict) else {"": outputs}
                found |= {f"{name} {key}": one for key, one in outputs.items()}
            case "batch":
                found[name] = model.train_on_batch(*data.batch(0))
            case "freeze":
                model.layers[-1].trainable = False
                compile_model(case, model)
            case "weights":
                model.set_weights([0.9 * one for one in model.get_weights()])
    weights = {
        f"{number} {variable.name}": torch.as_tensor(variable.numpy())
        for number, variable in enumerate(model.weights)
    }
    told = {name: torch.as_tensor(np.asarray(one, "float64")) for name, one in found.items()}
    return {"weight": weights, **{name: {name: one} for name, one in told.items()}}


def run(case: KerasCase) -> Outcome:
    """Run a case on both sides."""
    with warnings.catch_warnings(), true_float64():
        warnings.simplefilter("ignore")
        plain = lambda one, mix: values(one, nullcontext(), mix)  # noqa: E731
        careful = replace(case, optimizer="SGD", options={})
        return judged(
            settled((case, careful), plain), lambda one: values(one, strategy_of(one).scope())
        )
