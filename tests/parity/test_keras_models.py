"""Models that users make of Keras's other layers, and of layers of their own: as plain Keras."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.errors import ModelError
from tests import keras_zoo as zoo
from tests.launchers import run_script
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

SAMPLES, BATCH = 30, 12  # the last batch is short
STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "one": lambda: lockstep.SingleDeviceStrategy(),
    "mirrored": lambda: lockstep.MirroredStrategy(devices=2),
    "pipeline": lambda: lockstep.PipelineStrategy(stages=2, microbatches=3),
}
IMAGES = zoo.vectors(SAMPLES, 8 * 8 * 3).reshape(SAMPLES, 8, 8, 3)
VECTORS = zoo.vectors(SAMPLES)
NUMBERS = np.arange(SAMPLES * 5).reshape(SAMPLES, 5) % 7
TARGETS = zoo.classes(SAMPLES)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with zoo.true_float64():
        yield


def of_images(*stack: Any) -> Any:
    return keras.Sequential(
        [keras.Input((8, 8, 3)), *stack, layers.Flatten(), layers.Dense(zoo.NUM_CLASSES)]
    )


def preprocessed() -> Any:
    normalization = layers.Normalization(mean=[0.1, 0.2, 0.3], variance=[1.0, 2.0, 0.5])
    return of_images(
        layers.Rescaling(0.5, offset=0.1), normalization, layers.Resizing(4, 4), layers.Conv2D(4, 2)
    )


class Viewed(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """PyTorch code that takes images for contiguous with their channels first."""

    def call(self, inputs: Any) -> Any:
        return inputs.view(-1, 4, 16)


def viewed() -> Any:
    inputs = keras.Input((8, 8, 3))
    pooled = layers.MaxPooling2D(2)(layers.Conv2D(4, 3, padding="same")(inputs))
    flat = Viewed()(layers.Permute((3, 1, 2))(pooled))
    return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES)(layers.Flatten()(flat)))


def of_a_slice() -> Any:
    """Of which torch cannot always take the gradient as it lies in memory."""
    inputs = keras.Input((8, 8, 3))
    grown = layers.Conv2DTranspose(2, 3, strides=2, padding="same")(inputs[..., :1])
    return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES)(layers.Flatten()(grown)))


class Adding(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return ops.tanh(inputs)


def with_layers_as_activations() -> Any:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8, activation=Adding()),
            layers.Dense(8, activation=layers.ReLU(activity_regularizer="l2")),
            layers.Dense(zoo.NUM_CLASSES),
        ]
    )


def deep() -> Any:
    """Deeper than pickle goes by itself."""
    inputs = hidden = keras.Input((8,))
    for _ in range(40):
        hidden = layers.Add()([hidden, layers.Dense(8, activation="tanh")(hidden)])
        hidden = layers.LayerNormalization()(hidden)
    return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES)(hidden))


def of_numbers_looked_up() -> Any:
    """With tables of TensorFlow, one of them of numbers that the layer has seen."""
    known = layers.IntegerLookup(vocabulary=[3, 1, 4], output_mode="multi_hot")
    seen = layers.IntegerLookup(max_tokens=4)
    seen.adapt(NUMBERS)
    inputs = keras.Input((5,), dtype="int64")
    embedded = layers.Flatten()(layers.Embedding(4, 3)(seen(inputs)))
    outputs = layers.Dense(zoo.NUM_CLASSES)(layers.Concatenate()([known(inputs), embedded]))
    return keras.Model(inputs, outputs)


def with_a_list_of_one_output() -> Any:
    inputs = keras.Input((8,))
    hidden = layers.Dense(6)(inputs)
    return keras.Model([inputs], [layers.Dense(zoo.NUM_CLASSES)(hidden)])


class Placed(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Words and their places, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = layers.Embedding(7, 4), layers.Embedding(5, 4)

    def call(self, inputs: Any) -> Any:
        return self.words(inputs) + self.places(ops.arange(0, ops.shape(inputs)[-1], 1))


def of_words() -> Any:
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int64"),
            Placed(),
            layers.Flatten(),
            layers.Dense(zoo.NUM_CLASSES),
        ]
    )


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "preprocessed": (preprocessed, IMAGES),
    "viewed": (viewed, IMAGES),
    "of a slice": (of_a_slice, IMAGES),
    "layers as activations": (with_layers_as_activations, VECTORS),
    "deep": (deep, VECTORS),
    "words": (of_words, NUMBERS),
    "numbers looked up": (of_numbers_looked_up, NUMBERS),
    "a list of one output": (with_a_list_of_one_output, VECTORS),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    core_of(
        [(name, strategy) for name in MODELS for strategy in STRATEGIES],
        lambda name, strategy: strategy == "mirrored" and name != "deep",
        lambda name, strategy: (name, strategy) == ("deep", "one"),
    ),
)
def test_weights_and_outputs_are_those_of_plain_keras(name: str, strategy: str) -> None:
    check_fit_and_predict(*MODELS[name], strategy)


def test_why_a_model_of_one_layer_has_one_stage() -> None:
    model = zoo.compiled(of_numbers_looked_up, example=NUMBERS)
    plan = STRATEGIES["pipeline"]().plan(model, batch_size=BATCH, sample=NUMBERS)
    assert plan.num_ranks == 1
    assert "uses a tensor's values outside torch" in " ".join(plan.notes)


def check_fit_and_predict(make: Callable[[], Any], x: Any, strategy: str) -> None:
    plain = zoo.compiled(make, example=x)
    with STRATEGIES[strategy]().scope():
        model = zoo.compiled(make, example=x)
    for one in (plain, model):
        one.fit(x, TARGETS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert zoo.distance(plain, model) < 1e-12
    wanted, found = plain.predict(x, verbose=0), model.predict(x, verbose=0)
    assert type(found) is type(wanted)
    np.testing.assert_allclose(found, wanted, atol=1e-10)


def siamese() -> Any:
    """Statistics of a layer that is called twice."""
    net = keras.Sequential(
        [keras.Input((8,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(4)]
    )
    inputs = keras.Input((8,))
    difference = layers.Subtract()([net(inputs), net(-inputs)])
    return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES)(difference))


@pytest.mark.parametrize(
    "strategy",
    [lockstep.MirroredStrategy(2), lockstep.PipelineStrategy(2, microbatches=1)],
    ids=["mirrored", "pipeline"],
)
def test_statistics_of_a_layer_that_is_called_twice(strategy: lockstep.Strategy) -> None:
    plain = zoo.compiled(siamese, example=VECTORS)
    with strategy.scope():
        model = zoo.compiled(siamese, example=VECTORS)
    for each in (plain, model):
        each.fit(VECTORS, TARGETS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert zoo.distance(plain, model) < 1e-12
    np.testing.assert_allclose(
        model.predict(VECTORS, verbose=0), plain.predict(VECTORS, verbose=0), rtol=1e-9
    )


class Counting(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Counts its calls in training, and how large values are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.size = keras.metrics.Mean(name="size")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1.0)
        self.size.update_state(ops.sum(ops.abs(inputs), axis=-1))
        return inputs * (1 + self.calls)


class Averaging(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Keeps an average of its own over what it has seen."""

    def build(self, shape: Any) -> None:
        self.center = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.center.assign(0.9 * self.center + 0.1 * ops.mean(inputs, axis=0))
        return inputs - self.center


class Measuring(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Tells a metric one value for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, inputs: Any) -> Any:
        self.size.update_state(ops.mean(ops.abs(inputs)))
        return inputs


def with_layer(layer: type[layers.Layer]) -> Callable[[], Any]:
    return lambda: keras.Sequential(
        [keras.Input((8,)), layer(), layers.Dense(6), layers.Dense(zoo.NUM_CLASSES)]
    )


def test_layers_that_count_calls_and_samples() -> None:
    make = with_layer(Counting)
    plain = zoo.compiled(make, example=VECTORS)
    with STRATEGIES["mirrored"]().scope():
        model = zoo.compiled(make, example=VECTORS)
    one, other = (
        each.fit(VECTORS, TARGETS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        for each in (plain, model)
    )
    assert zoo.distance(plain, model) < 1e-12
    np.testing.assert_allclose(other.history["size"], one.history["size"], rtol=1e-9)


@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            Averaging,
            r"must not depend on the samples. Received: calls change .*averaging.*variable",
        ),
        (Measuring, r"must get a value for each sample. Received: one value for a batch: size"),
    ],
)
def test_layers_that_must_see_the_whole_batch(
    layer: type[layers.Layer], message: str, strategy: str
) -> None:
    make = with_layer(layer)
    with STRATEGIES[strategy]().scope():
        model = zoo.compiled(make, example=VECTORS)
    weights = model.get_weights()
    with pytest.raises(ModelError, match=message):
        model.fit(VECTORS, TARGETS, verbose=0)
    assert all(map(np.array_equal, model.get_weights(), weights))
    with STRATEGIES["one"]().scope():
        model = zoo.compiled(make, example=VECTORS)
    model.fit(VECTORS, TARGETS, verbose=0)


IMPORTS_TORCH = """
import lockstep
import keras
import numpy as np
import torch  # a module that knows torch, and with it all its names

x, y = np.random.rand(40, 8, 8, 3).astype("float32"), np.random.randint(0, 3, 40)
with lockstep.PipelineStrategy(stages=2, microbatches=2).scope():
    convolution = keras.layers.Conv2D(4, 3, padding="same")
    stack = [convolution, keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8, 8, 3)), *stack])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=10, verbose=0)
"""


@pytest.mark.thorough
def test_convolutions_in_a_pipeline_of_a_script_that_imports_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IMPORTS_TORCH)
    run_script([script], tmp_path, like="keras")


def remembering() -> Any:
    return keras.Sequential(
        [
            keras.Input(batch_shape=(10, 4, 2)),
            layers.SimpleRNN(5, stateful=True),
            layers.Dense(zoo.NUM_CLASSES),
        ]
    )


def test_a_model_for_batches_of_one_size() -> None:
    x = VECTORS.reshape(SAMPLES, 4, 2)
    options: dict[str, Any] = {"batch_size": 10, "shuffle": False, "verbose": 0}
    plain = zoo.compiled(remembering)
    with STRATEGIES["one"]().scope():
        model = zoo.compiled(remembering)
    for one in (plain, model):
        one.fit(x, TARGETS, **options)
    assert zoo.distance(plain, model) < 1e-12
    check_refused_by_all_calls(remembering, x, r"for 10 samples.*SingleDeviceStrategy")


def check_refused_by_all_calls(make: Any, x: Any, said: str) -> None:
    batch = x[:10], TARGETS[:10]
    with STRATEGIES["mirrored"]().scope():
        model = zoo.compiled(make)
    calls: list[Any] = [
        lambda: model.fit(*batch, batch_size=10, verbose=0),
        lambda: model.evaluate(*batch, batch_size=10, verbose=0),
        lambda: model.predict(batch[0], batch_size=10, verbose=0),
        lambda: model.train_on_batch(*batch),
        lambda: model.test_on_batch(*batch),
        lambda: model.predict_on_batch(batch[0]),
    ]
    for call in calls:
        with pytest.raises(ModelError, match=said):
            call()


class Remembering(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Has no inputs that say what batches it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = layers.SimpleRNN(5, stateful=True)
        self.last = layers.Dense(zoo.NUM_CLASSES)

    def call(self, x: Any) -> Any:
        return self.last(self.recurrent(x))


class Moving(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Keeps the mean of its last batch, in every mode."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(), trainable=False)

    def call(self, x: Any) -> Any:
        self.mean.assign(keras.ops.mean(x))
        return x


def remembering_without_inputs() -> Any:
    model = Remembering()
    model(np.zeros((10, 4, 2)))
    return model


def moving() -> Any:
    first = keras.Input((8,))
    return keras.Model(first, layers.Dense(zoo.NUM_CLASSES)(Moving()(first)))


def test_what_fit_refuses_every_call_refuses() -> None:
    x = VECTORS.reshape(SAMPLES, 4, 2)
    check_refused_by_all_calls(remembering_without_inputs, x, "for 10 samples")
    check_refused_by_all_calls(moving, VECTORS, "the state of a layer must not depend")


def test_a_batch_size_of_an_input_binds_nobody() -> None:
    def make() -> Any:
        first = keras.Input((8,), batch_size=BATCH)
        return keras.Model(first, layers.Dense(zoo.NUM_CLASSES)(layers.Dense(5)(first)))

    plain = zoo.compiled(make)
    with STRATEGIES["mirrored"]().scope():
        model = zoo.compiled(make)
    for one in (plain, model):
        one.fit(VECTORS, TARGETS, batch_size=BATCH, shuffle=False, verbose=0)
    assert zoo.distance(plain, model) < 1e-12


def two_inputs() -> Any:
    ends = [keras.Input((8,), name="a"), keras.Input((3,), name="b")]
    joined = layers.Dense(6)(layers.Concatenate()(ends))
    return keras.Model(ends, layers.Dense(zoo.NUM_CLASSES)(joined))


def test_plans_for_data_as_keras_takes_it() -> None:
    model = zoo.compiled(two_inputs, example=[VECTORS, VECTORS[:, :3]])
    inputs = [VECTORS, VECTORS[:, :3]]
    for sample in (inputs, (inputs, TARGETS), ({"a": inputs[0], "b": inputs[1]}, TARGETS)):
        plan = STRATEGIES["pipeline"]().plan(model, batch_size=BATCH, sample=sample)
        assert plan.precision == "fp64"
        assert plan.num_ranks == 2


class WithoutWeights(keras.metrics.Metric):  # type: ignore[misc]  # Keras is untyped
    def update_state(self, targets: Any, outputs: Any) -> None:
        pass

    def result(self) -> Any:
        return 0.0


def absolute(targets: Any, outputs: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(targets - outputs), -1)


def masked_words(**compiled: Any) -> Any:
    keras.utils.set_random_seed(0)
    embedding = layers.Embedding(5, 4, mask_zero=True)
    recurrent = layers.LSTM(4, return_sequences=True)
    model = keras.Sequential([keras.Input((6,)), embedding, recurrent, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), **compiled)
    return model


def with_two_outputs() -> Any:
    first = keras.Input((8,))
    outputs = [layers.Dense(3, activation="softmax", name=name)(first) for name in "ab"]
    model = keras.Model(first, outputs)
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


WORDS = np.arange(96).reshape(16, 6) % 5 * (np.arange(6) < 4)
REAL = np.linspace(0, 1, 96).reshape(16, 6, 1)
BOTH = [np.arange(16) % 3] * 2
SAID_OR_FOUND: dict[str, Any] = {
    "own loss": (lambda: masked_words(loss=absolute, metrics=[absolute]), WORDS, REAL, {}),
    "metric": (lambda: masked_words(loss="mse", metrics=[WithoutWeights()]), WORDS, REAL, {}),
    "weights": (with_two_outputs, VECTORS[:16], BOTH, {"class_weight": {0: 1.0, 1: 2.0, 2: 3.0}}),
}


@pytest.mark.parametrize("name", SAID_OR_FOUND)
def test_masks_and_class_weights_are_as_in_keras(name: str) -> None:
    """The same values, or the same error in the same words."""
    make, x, y, options = SAID_OR_FOUND[name]

    def come_to() -> Any:
        model = make()
        try:
            found = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **options).history
        except (TypeError, ValueError) as error:
            return type(error), str(error)
        return {key: values[-1] for key, values in found.items()}

    plain = come_to()
    with STRATEGIES["mirrored"]().scope():
        found = come_to()
    assert found == (pytest.approx(plain, rel=1e-6) if isinstance(plain, dict) else plain)
    assert isinstance(plain, dict) == (name == "own loss")
