"""Losses, weights, penalties and metrics of Keras models: what plain Keras makes of them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from tests import keras_zoo as zoo
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

SAMPLES, BATCH = 50, 12  # the last batch is short
STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "mirrored": lambda: lockstep.MirroredStrategy(devices=2),
    "shares": lambda: lockstep.MirroredStrategy(devices=2, num_shares=3),
    "pipeline": lambda: lockstep.PipelineStrategy(stages=2, microbatches=3),
}
X = zoo.vectors(SAMPLES)
Y = zoo.classes(SAMPLES)
WEIGHTS = np.random.default_rng(5).uniform(0.1, 2, size=SAMPLES)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with zoo.true_float64():
        yield


@pytest.fixture(params=core_of(STRATEGIES, ["mirrored"]))
def strategy(request: pytest.FixtureRequest) -> lockstep.Strategy:
    return STRATEGIES[request.param]()


def compare(
    strategy: lockstep.Strategy,
    make: Callable[[], Any],
    compile_options: Callable[[], dict[str, Any]],
    x: Any = X,
    y: Any = Y,
    **options: Any,
) -> Any:
    """Train plainly, and under a strategy; returns the latter model."""
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    plain = zoo.compiled(make, example=x, **compile_options())
    with strategy.scope():
        model = zoo.compiled(make, example=x, **compile_options())
    wanted, found = plain.fit(x, y, **options), model.fit(x, y, **options)
    assert zoo.distance(plain, model) < 1e-12
    assert list(found.history) == list(wanted.history)
    for key, values in wanted.history.items():
        np.testing.assert_allclose(found.history[key], values, rtol=1e-6, err_msg=key)
    one = plain.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    other = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    assert list(one) == list(other)
    for key, value in one.items():
        np.testing.assert_allclose(other[key], value, rtol=1e-6, err_msg=key)
    return model


def crossentropy(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def test_sample_weights(strategy: lockstep.Strategy) -> None:
    compare(
        strategy,
        zoo.sequential,
        lambda: {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]},
        sample_weight=WEIGHTS,
        validation_data=(X[:20], Y[:20], WEIGHTS[:20]),
    )


def test_class_weights_and_a_split(strategy: lockstep.Strategy) -> None:
    compare(
        strategy,
        zoo.sequential,
        lambda: {"weighted_metrics": ["accuracy"]},
        class_weight={0: 1.0, 1: 3.0, 2: 0.25},
        validation_split=0.3,
    )


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_reductions(strategy: lockstep.Strategy, reduction: str) -> None:
    compare(
        strategy,
        zoo.sequential,
        lambda: {"loss": crossentropy(reduction=reduction), "optimizer": "sgd"},
        sample_weight=WEIGHTS,
    )


def two_headed() -> Any:
    left, right = layers.Input((8,), name="left"), layers.Input((3,), name="right")
    joined = layers.Concatenate()([layers.Dense(6, activation="relu")(left), right])
    return keras.Model(
        [left, right],
        [layers.Dense(zoo.NUM_CLASSES, name="kind")(joined), layers.Dense(2, name="size")(joined)],
    )


def test_several_inputs_and_outputs(strategy: lockstep.Strategy) -> None:
    compare(
        strategy,
        two_headed,
        lambda: {
            "loss": [crossentropy(), "mse"],
            "loss_weights": [1.0, 0.3],
            "metrics": [["accuracy"], ["mae"]],
        },
        [X, zoo.vectors(SAMPLES, 3)],
        [Y, zoo.vectors(SAMPLES, 2)],
    )


def test_outputs_by_name(strategy: lockstep.Strategy) -> None:
    inputs = {"left": X, "right": zoo.vectors(SAMPLES, 3)}
    targets = {"kind": Y, "size": zoo.vectors(SAMPLES, 2)}

    def make() -> Any:
        model = two_headed()
        outputs = dict(zip(("kind", "size"), model.outputs, strict=True))
        return keras.Model(dict(zip(("left", "right"), model.inputs, strict=True)), outputs)

    compare(
        strategy,
        make,
        lambda: {"loss": {"kind": crossentropy(), "size": "mae"}, "metrics": {"size": ["mse"]}},
        inputs,
        targets,
    )


class Adding(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Adds a mean, a sum, and a number that depends on no sample."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        scaled = inputs * self.scale
        self.add_loss(0.1 * ops.mean(ops.square(scaled)))
        self.add_loss(1e-3 * ops.sum(ops.abs(scaled)))
        self.add_loss(0.1 * ops.sum(ops.square(self.scale)))
        return scaled


def penalized() -> Any:
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(9, activation="tanh", kernel_regularizer="l2", bias_regularizer="l1"),
            Adding(),
            layers.Dense(6, activation="tanh", activity_regularizer=keras.regularizers.L2(1e-3)),
            layers.Dense(zoo.NUM_CLASSES, kernel_regularizer="orthogonal_regularizer"),
        ]
    )


def test_additions_count_once(strategy: lockstep.Strategy) -> None:
    compare(strategy, penalized, lambda: {"metrics": ["accuracy"]})


def root(target: Any, output: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(target - output)))


class Root(keras.losses.Loss):  # type: ignore[misc]  # Keras is untyped
    def call(self, target: Any, output: Any) -> Any:
        return root(target, output)


def test_a_loss_that_returns_a_sum(strategy: lockstep.Strategy) -> None:
    compare(
        strategy,
        zoo.sequential,
        lambda: {"loss": lambda y, p: 1e-2 * ops.sum(ops.square(y - p))},
        y=zoo.vectors(SAMPLES, zoo.NUM_CLASSES),
    )


@pytest.mark.parametrize(
    "make", [lambda: root, Root, keras.losses.Dice, lambda: keras.losses.CosineSimilarity(axis=0)]
)
def test_a_loss_across_samples(strategy: lockstep.Strategy, make: Callable[[], Any]) -> None:
    """Made here, and not before, where Keras would have it compute in float32."""
    y = np.abs(zoo.vectors(SAMPLES, zoo.NUM_CLASSES))
    compare(strategy, zoo.sequential, lambda: {"loss": make()}, y=y)


def test_weights_of_a_loss_that_returns_one_number(strategy: lockstep.Strategy) -> None:
    options: dict[str, Any] = {"loss": lambda y, p: ops.mean(ops.square(y - p))}
    y = zoo.vectors(SAMPLES, zoo.NUM_CLASSES)
    compare(strategy, zoo.sequential, lambda: options, y=y, sample_weight=WEIGHTS)


def test_a_mean_whose_terms_cancel() -> None:
    """Where little is left of large terms, rounding is a large part of it."""
    signs = np.where(np.arange(SAMPLES) % 2, -1.0, 1.0)[:, None] * np.ones(zoo.NUM_CLASSES)
    compare(
        STRATEGIES["mirrored"](),
        zoo.sequential,
        lambda: {"loss": lambda y, p: ops.mean(y * (1e6 + p))},
        y=signs,
    )


@pytest.mark.parametrize(
    "metric",
    [
        keras.losses.MeanSquaredError(),
        keras.losses.Huber(reduction="sum"),
        keras.losses.Dice(),
        keras.metrics.CosineSimilarity(axis=0),
        keras.metrics.PearsonCorrelation(axis=0),
    ],
    ids=["loss", "sum", "dice", "axis 0", "correlation"],
)
def test_metrics_across_samples(strategy: lockstep.Strategy, metric: Any) -> None:
    y = np.abs(zoo.vectors(SAMPLES, zoo.NUM_CLASSES))
    compare(strategy, zoo.sequential, lambda: {"loss": "mse", "metrics": [metric]}, y=y)


def shrunk() -> Any:
    """A sum that is 0 where the inputs are."""
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Activation("linear", activity_regularizer=keras.regularizers.L2(1e-2)),
            layers.Dense(6, use_bias=False, activity_regularizer=keras.regularizers.L1(1e-3)),
            layers.Dense(zoo.NUM_CLASSES),
        ]
    )


def test_a_sum_that_is_0_for_the_first_samples(strategy: lockstep.Strategy) -> None:
    late = X.copy()
    late[:10] = 0
    compare(strategy, shrunk, dict, late)


def test_what_is_0_for_all_samples(strategy: lockstep.Strategy) -> None:
    compare(strategy, shrunk, dict, 0 * X)


class Reducing(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Adds a mean, or a sum, over samples."""

    def __init__(self, reduce: Callable[[Any], Any]) -> None:
        super().__init__()
        self.reduce = reduce

    def call(self, inputs: Any) -> Any:
        self.add_loss(1e-3 * self.reduce(ops.square(inputs)))
        return inputs


def reducing(reduce: Callable[[Any], Any]) -> Any:
    dense = [layers.Dense(6, use_bias=False), layers.Dense(zoo.NUM_CLASSES)]
    return keras.Sequential([layers.Input((8,)), dense[0], Reducing(reduce), dense[1]])


def late(first: int) -> Any:
    """Samples that are 0 where a model is looked at, and up to the first that counts."""
    samples = X.copy()
    samples[:first] = 0
    samples[np.linspace(0, len(X) - 1, 8).astype(int)] = 0
    return samples


def test_a_mean_that_is_0_for_some_steps() -> None:
    compare(STRATEGIES["mirrored"](), partial(reducing, ops.mean), dict, late(2 * BATCH))


@pytest.mark.parametrize("first", [0, 2 * BATCH], ids=["at once", "later"])
@pytest.mark.parametrize("name", ["mirrored", "pipeline"])
def test_a_sum_that_was_taken_for_a_mean_is_refused_in_training(name: str, first: int) -> None:
    """The few samples that are looked at before have nothing to say; those of a step have."""
    with STRATEGIES[name]().scope():
        model = zoo.compiled(partial(reducing, ops.sum))
    with pytest.raises(lockstep.LockstepError, match=r"layers add.* must"):
        model.fit(late(first), Y, batch_size=BATCH, shuffle=False, verbose=0)


def masked() -> Any:
    return keras.Sequential(
        [
            layers.Input((5, 8)),
            layers.Masking(),
            layers.Dense(6, activation="tanh"),
            layers.Dense(zoo.NUM_CLASSES),
        ]
    )


def sequences() -> Any:
    """Sequences of different lengths, the rest zeros."""
    values = zoo.vectors(SAMPLES, 40).reshape(SAMPLES, 5, 8)
    for sample, length in enumerate(np.random.default_rng(2).integers(1, 6, size=SAMPLES)):
        values[sample, length:] = 0
    return values


def test_masks(strategy: lockstep.Strategy) -> None:
    targets = np.random.default_rng(3).integers(0, zoo.NUM_CLASSES, size=(SAMPLES, 5))
    compare(strategy, masked, lambda: {"metrics": ["accuracy"]}, sequences(), targets)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mirrored", "shares"])
def test_a_batch_that_is_masked_as_a_whole(name: str) -> None:
    """Its step moves weights by the momentum that they have."""
    targets = np.random.default_rng(3).integers(0, zoo.NUM_CLASSES, size=(SAMPLES, 5))
    values = sequences()
    values[BATCH : 2 * BATCH] = 0
    compare(STRATEGIES[name](), masked, dict, values, targets)


def test_masks_beside_penalties() -> None:
    targets = np.random.default_rng(3).integers(0, zoo.NUM_CLASSES, size=(SAMPLES, 5))

    def make() -> Any:
        inputs = layers.Input((5, 8))
        hidden = layers.Masking()(inputs)
        hidden = layers.Dense(6, activation="tanh", kernel_regularizer="l2")(hidden)
        return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES)(hidden))

    compare(STRATEGIES["shares"](), make, dict, sequences(), targets)


def mean_error(target: Any, output: Any) -> Any:
    """One number for the whole batch."""
    return ops.mean(ops.abs(ops.max(output, axis=-1) - ops.cast(target, output.dtype)))


class Largest(keras.metrics.Metric):  # type: ignore[misc]  # Keras is untyped
    """The largest output so far: no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros")

    def update_state(self, target: Any, output: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(output)))

    def result(self) -> Any:
        return self.value


@pytest.mark.parametrize("metrics", ["own", "foreign"])
def test_metrics(strategy: lockstep.Strategy, metrics: str) -> None:
    chosen: dict[str, Callable[[], list[Any]]] = {
        "own": lambda: [
            "accuracy",
            keras.metrics.SparseTopKCategoricalAccuracy(2),
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
        ],
        "foreign": lambda: ["accuracy", mean_error, Largest()],
    }
    compare(strategy, zoo.sequential, lambda: {"metrics": chosen[metrics]()})


class Counting(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Counts what passes, in a metric of its own."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.counted = metric

    def call(self, inputs: Any) -> Any:
        self.counted.update_state(inputs[:, 0])
        return inputs


def counting(metric: Callable[[], Any]) -> Any:
    return keras.Sequential(
        [layers.Input((8,)), Counting(metric()), layers.Dense(6), layers.Dense(zoo.NUM_CLASSES)]
    )


def test_metrics_of_layers() -> None:
    def make() -> Any:
        return counting(lambda: keras.metrics.Mean(name="passed"))

    for name in ("mirrored", "shares"):
        compare(STRATEGIES[name](), make, lambda: {"metrics": ["accuracy"]})


class Peak(keras.metrics.Mean):  # type: ignore[misc]  # Keras is untyped
    """The largest value so far: no sum."""

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        self.total.assign(ops.maximum(self.total, ops.max(values)))
        self.count.assign(1)


def test_metrics_of_layers_that_are_no_sums() -> None:
    with STRATEGIES["mirrored"]().scope():
        model = zoo.compiled(lambda: counting(lambda: Peak(name="largest")))
    with pytest.raises(lockstep.LockstepError, match="largest"):
        model.fit(X, Y, verbose=0)


@pytest.mark.thorough
def test_added_losses_beside_batch_normalization() -> None:
    def make() -> Any:
        return keras.Sequential(
            [
                layers.Input((8,)),
                Adding(),
                layers.BatchNormalization(),
                Adding(),
                layers.Dense(zoo.NUM_CLASSES),
            ]
        )

    compare(STRATEGIES["mirrored"](), make, lambda: {"optimizer": "sgd"})
    with pytest.raises(lockstep.LockstepError, match="a device for each share"):
        compare(STRATEGIES["shares"](), make, lambda: {"optimizer": "sgd"})
