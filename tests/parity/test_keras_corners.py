"""Corners of Keras that few models touch, and callbacks that reach far: as plain Keras, or refused.

In float32, as users run it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from keras import layers, ops
from keras.src.backend.torch.trainer import TorchTrainer

import lockstep
from lockstep.errors import DataError, ModelError, OptionError
from tests import keras_zoo as zoo
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

X = zoo.vectors(41).astype("float32")
Y = X[:, :1] * 2 + 1
OPTIONS: dict[str, Any] = {"batch_size": 9, "shuffle": False, "verbose": 0}

Model = Any
Use = Callable[[Model], Any]


def stacked(*stack: Any, **options: Any) -> Model:
    model = keras.Sequential([keras.Input((8,)), *stack])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


def fitted(model: Model, x: Any = X, y: Any = Y, **options: Any) -> Any:
    return model.fit(x, y, **{**OPTIONS, **options}).history


def two_heads(**options: Any) -> Model:
    """Of which one is trained."""
    inputs = keras.Input((8,))
    hidden = layers.Dense(6)(inputs)
    model = keras.Model(inputs, [layers.Dense(1)(hidden), layers.Dense(40)(hidden)])
    model.compile(keras.optimizers.SGD(0.01, use_ema=True, **options), loss=["mse", None])
    return model


class Square(keras.losses.Loss):  # type: ignore[misc]  # Keras is untyped
    """Looks at shapes: a column less a row is a matrix."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_true - y_pred), axis=-1)


class Scale(layers.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.factors, self.array, self.num_calls = (1.0,), np.ones(1, "float32"), 0

    def call(self, inputs: Any) -> Any:
        return inputs * self.factors[0] * float(self.array[0])


class Counts(layers.Layer):  # type: ignore[misc]
    """Begins gently, by a count in Python."""

    num_calls = 0

    def call(self, inputs: Any, training: Any = None) -> Any:
        if training:
            self.num_calls = self.num_calls + 1
        return inputs * (0.5 if self.num_calls < 3 else 1.0)


class Adds(layers.Layer):  # type: ignore[misc]
    """Adds a loss that is no number."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(inputs), axis=0))
        return inputs


class Forgets(layers.Layer):  # type: ignore[misc]
    """Writes to its weight whenever it is called."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any, training: Any = None) -> Any:
        if training:
            self.factor.assign(self.factor * 0.9)
        return inputs * self.factor


class Activation:
    """One of the user's own, with an option, and without a config."""

    scale = 1.0

    def __call__(self, inputs: Any) -> Any:
        return inputs * self.scale


class TorchScale(torch.nn.Module):
    scale = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.scale


def without_weights() -> Model:
    return stacked(layers.Rescaling(2.0), layers.Dense(1, trainable=False))


def partly_frozen() -> Model:
    """A frozen part with a layer in it that is not: Keras trains nothing of the part."""
    part = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(4)])
    part.trainable = False
    part.layers[-1].trainable = True
    return stacked(part, layers.Dense(1))


def matrix(weights: Any) -> Any:
    return 0.01 * ops.square(weights)


class TrainedLayer(TorchTrainer, layers.Dense):  # type: ignore[misc]
    """Can be trained, and is no Model."""

    def __init__(self) -> None:
        layers.Dense.__init__(self, 1)
        TorchTrainer.__init__(self)
        self.compile("sgd", "mse")


def named_inputs() -> Model:
    one, other = layers.Input((8,), name="one"), layers.Input((8,), name="other")
    return keras.Model({"one": one, "other": other}, layers.Add()([one, layers.Dense(8)(other)]))


def with_listed_inputs(model: Model) -> Any:
    with pytest.warns(UserWarning, match="doesn't match the expected structure"):
        return model.predict([X, 2 * X], verbose=0)


def limited(model: Model) -> Any:
    keras.config.set_max_epochs(1)
    try:
        with pytest.warns(UserWarning, match="Limiting epochs to 1"):
            return fitted(model, epochs=3)
    finally:
        keras.config.set_max_epochs(None)


def of_each_batch(model: Model) -> list[float]:
    seen: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])
    )
    ordered = np.repeat(np.arange(5.0, dtype="float32"), 9)[:41, None]
    fitted(model, y=ordered, shuffle="batch", callbacks=[note])
    return seen


def between_epochs(act: Callable[[Model, int], None]) -> Any:
    class Callback(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            act(self.model, epoch)

    return Callback()


def set_optimizer(model: Model, epoch: int) -> None:
    if epoch == 1:
        model.optimizer = keras.optimizers.SGD(0.0001)


class WeighedByVariable:
    """Losses whose weight is a variable."""

    def __init__(self) -> None:
        self.weight = keras.Variable(1.0, trainable=False)

    def make(self) -> Model:
        inputs = keras.Input((8,))
        model = keras.Model(inputs, [layers.Dense(1)(inputs), layers.Dense(1)(inputs)])
        model.compile("sgd", ["mse", "mse"], loss_weights=[1.0, self.weight])
        self.weight.assign(1.0)
        return model

    def use(self, model: Model) -> Any:
        lower = between_epochs(lambda model, epoch: self.weight.assign(1.0 / (1 + 3 * epoch)))
        return fitted(model, y=[Y, Y], epochs=3, callbacks=[lower])


weighed = WeighedByVariable()


def activated(model: Model, epoch: int) -> None:
    model.layers[0].activation.scale = 1.0 + epoch


def scaled(model: Model, epoch: int) -> None:
    model.layers[0].module.scale = 1.0 + epoch


CORNERS: dict[str, tuple[Callable[[], Model], Use]] = {
    "averages of what has no gradient": (two_heads, lambda model: fitted(model, y=[Y, None])),
    "averages that replace it": (
        lambda: two_heads(ema_overwrite_frequency=3),
        lambda model: fitted(model, y=[Y, None], epochs=2),
    ),
    "a Series is a column": (
        lambda: stacked(layers.Dense(1), loss=Square()),
        lambda model: fitted(model, y=pd.Series(Y[:, 0])),
    ),
    "a sparse matrix": (
        lambda: stacked(layers.Dense(1)),
        lambda model: fitted(model, scipy.sparse.csr_matrix(X)),
    ),
    "outputs without an axis": (
        lambda: stacked(layers.Dense(1), layers.Reshape(()), metrics=["mae", "mse"]),
        lambda model: (fitted(model, y=Y[:, 0]), model.evaluate(X, Y[:, 0], 9, verbose=0)),
    ),
    "a limit on epochs": (lambda: stacked(layers.Dense(1)), limited),
    "an order within batches": (lambda: stacked(layers.Dense(1)), of_each_batch),
    "counts in Python": (lambda: stacked(Counts(), layers.Dense(1)), fitted),
    "a loss that is a vector": (lambda: stacked(layers.Dense(4), Adds(), layers.Dense(1)), fitted),
    "a penalty that is a matrix": (
        lambda: stacked(layers.Dense(1, kernel_regularizer=matrix)),
        fitted,
    ),
    "a frozen part": (partly_frozen, fitted),
    "a layer that is a Trainer": (TrainedLayer, fitted),
    "a list of what has names": (named_inputs, with_listed_inputs),
    "no config": (lambda: stacked(layers.Dense(4, Activation()), layers.Dense(1)), fitted),
    "an activation's option": (
        lambda: stacked(layers.Dense(4, Activation()), layers.Dense(1)),
        lambda model: fitted(model, epochs=3, callbacks=[between_epochs(activated)]),
    ),
    "a torch module's option": (
        lambda: stacked(layers.TorchModuleWrapper(TorchScale()), layers.Dense(1)),
        lambda model: fitted(model, epochs=3, callbacks=[between_epochs(scaled)]),
    ),
    "another optimizer": (
        lambda: stacked(layers.Dense(1)),
        lambda model: fitted(model, epochs=3, callbacks=[between_epochs(set_optimizer)]),
    ),
    "a weight of losses": (weighed.make, weighed.use),
}
CORE = (
    *("averages of what has no gradient", "a limit on epochs", "an order within batches"),
    *("a frozen part", "no config", "another optimizer"),
)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("name", core_of(CORNERS, CORE))
def test_as_plain_keras(name: str) -> None:
    make, use = CORNERS[name]
    models, found = [], []
    for scope in (nullcontext(), lockstep.MirroredStrategy(devices=2).scope()):
        keras.utils.set_random_seed(1)
        with scope:
            models.append(make())
        found.append(use(models[-1]))
    plain, ours = found
    for one, other in zip(keras.tree.flatten(ours), keras.tree.flatten(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    for one, other in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_without_weights_predicts() -> None:
    models = []
    for scope in (nullcontext(), lockstep.MirroredStrategy(devices=2).scope()):
        with scope:
            models.append(stacked(layers.Rescaling(2.0)))
    plain, ours = ([one.predict(X, verbose=0), one.evaluate(X, X, verbose=0)] for one in models)
    np.testing.assert_allclose(ours[0], plain[0])
    np.testing.assert_allclose(ours[1], plain[1], rtol=1e-6)


def test_a_layer_that_writes_to_its_weight_is_refused() -> None:
    with lockstep.MirroredStrategy(devices=2).scope():
        model = stacked(Forgets(), layers.Dense(1))
    with pytest.raises(ModelError, match="a call must not change trained variables"):
        fitted(model)


# --- in the midst of an epoch ---------------------------------------------------------------------

_held = SimpleNamespace(value=1.0)


def held_loss(y_true: Any, y_pred: Any) -> Any:
    return _held.value * ops.square(y_true - y_pred)


class HeldLoss(Square):
    def __init__(self) -> None:
        super().__init__()
        self.weight = keras.Variable(1.0, trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.weight * super().call(y_true, y_pred)


class Falling(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    rate = 0.1

    def __call__(self, step: Any) -> float:
        return self.rate


def closure_loss() -> tuple[Callable[..., Any], list[float]]:
    held = [1.0]
    return (lambda y_true, y_pred: held[0] * ops.square(y_true - y_pred)), held


_loss, _of_loss = closure_loss()

CHANGES: dict[str, tuple[Callable[[], Model], Callable[[Model], None]]] = {
    "a loss's closure": (
        lambda: stacked(layers.Dense(1), loss=_loss),
        lambda model: _of_loss.__setitem__(0, 0.5),
    ),
    "a loss's variable": (
        lambda: stacked(layers.Dense(1), loss=HeldLoss()),
        lambda model: model.loss.weight.assign(0.5),
    ),
    "a schedule": (
        lambda: stacked(layers.Dense(1), optimizer=keras.optimizers.SGD(Falling())),
        lambda model: setattr(model.optimizer._learning_rate, "rate", 0.01),
    ),
    "the rate's kind": (
        lambda: stacked(layers.Dense(1)),
        lambda model: setattr(
            model.optimizer,
            "learning_rate",
            keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
        ),
    ),
    "a layer's tuple": (
        lambda: stacked(Scale(), layers.Dense(1)),
        lambda model: setattr(model.layers[0], "factors", (0.5,)),
    ),
    "a layer's array": (
        lambda: stacked(Scale(), layers.Dense(1)),
        lambda model: model.layers[0].array.fill(0.5),
    ),
}


@pytest.fixture(params=CHANGES)
def change(request: pytest.FixtureRequest) -> Iterator[tuple[Model, Callable[[Model], None]]]:
    make, act = CHANGES[request.param]
    with lockstep.MirroredStrategy(devices=2).scope():
        yield make(), act


def test_what_ranks_do_not_hear_of_is_refused(
    change: tuple[Model, Callable[[Model], None]],
) -> None:
    model, act = change

    class Changes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            act(self.model)

    with pytest.raises(OptionError, match=r"Within an epoch"):
        fitted(model, callbacks=[Changes()])


# --- what scripts have around calls ---------------------------------------------------------------

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "single": lockstep.SingleDeviceStrategy,
    "mirrored": partial(lockstep.MirroredStrategy, devices=2),
    "pipeline": partial(lockstep.PipelineStrategy, stages=2, microbatches=3),
}


def dense() -> list[Any]:
    return [layers.Dense(6, activation="relu"), layers.Dense(1)]


@pytest.mark.parametrize("name", core_of(STRATEGIES, ["mirrored"]))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_autograd_are_as_those_with_it(mode: Any, name: str) -> None:
    results, models = [], []
    for around in (nullcontext, mode):
        with STRATEGIES[name]().scope():
            model = stacked(*dense())
        zoo.set_weights(model)
        with around():
            found = fitted(model, epochs=2, validation_data=(X, Y))
            evaluated = model.evaluate(X, Y, verbose=0), model.train_on_batch(X, Y)
            outputs = model.predict(X, verbose=0)
        fitted(model)
        results.append((found, evaluated, outputs.tolist()))
        models.append(model)
    assert results[0] == results[1]
    assert zoo.distance(*models) == 0


def test_what_is_made_for_inference_cannot_be_trained() -> None:
    def built() -> Model:
        return keras.Sequential([keras.Input((8,)), *dense()])

    with lockstep.MirroredStrategy(devices=2).scope():
        with torch.inference_mode():
            model = built()
        model.compile("sgd", "mse")
        other = built()
        with torch.inference_mode():
            other.compile("sgd", "mse")
    for one in (model, other):
        with pytest.raises(ModelError, match=r"inference_mode.*Make the model"):
            fitted(one)


def test_a_torch_module_that_divides_the_work() -> None:
    with lockstep.MirroredStrategy(devices=2).scope():
        wrapped = layers.TorchModuleWrapper(torch.nn.DataParallel(torch.nn.Linear(8, 1)))
        model = stacked(wrapped)
    with pytest.raises(ModelError, match=r"DataParallel would do so, too.*module\.module is what"):
        fitted(model)


def test_a_second_thread_is_refused() -> None:
    refused: list[str] = []

    def evaluate() -> None:
        try:
            model.evaluate(X, Y, verbose=0)
        except OptionError as error:
            refused.append(str(error))

    def in_another_thread(epoch: int, logs: Any) -> None:
        model.evaluate(X, Y, verbose=0)  # here it may be
        with ThreadPoolExecutor(1) as other:
            other.submit(evaluate).result()

    with lockstep.MirroredStrategy(devices=2).scope():
        model = stacked(*dense())
    callback = keras.callbacks.LambdaCallback(on_epoch_end=in_another_thread)
    assert len(fitted(model, epochs=2, callbacks=[callback])["loss"]) == 2
    assert len(refused) == 2
    assert "evaluate while another thread is in fit" in refused[0]


# --- on one device alone, and on all --------------------------------------------------------------

BOTH = (lockstep.MirroredStrategy(devices=2), lockstep.PipelineStrategy(2))


@pytest.mark.parametrize("strategy", BOTH, ids=lambda one: type(one).__name__)
def test_layers_in_float8_are_refused(strategy: Any) -> None:
    """Their "gradients" are the largest numbers of a batch, which those of parts are not."""
    with strategy.scope():
        model = stacked(layers.Dense(4), layers.Dense(1))
        for layer in model.layers:
            layer.quantize("float8")
        model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"float8.*scale"):
        fitted(model)


def test_weights_of_another_dtype_do_not_narrow_the_data() -> None:
    """Keras has LoRA's weights in float32, also beside float64."""
    x, y = zoo.vectors(41), zoo.vectors(41, length=1, seed=1)
    found = []
    for scope in (nullcontext(), lockstep.SingleDeviceStrategy().scope()):
        keras.utils.set_random_seed(1)
        with zoo.true_float64(), scope:
            model = stacked(layers.Dense(4), layers.Dense(1))
            for layer in model.layers:
                layer.enable_lora(2)
            model.compile("adam", "mse")
            history = fitted(model, x, y)
        found.append([history["loss"], *model.get_weights()])
    for plain, own in zip(*found, strict=True):
        np.testing.assert_array_equal(own, plain)


class Noisy(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Draws one number for all samples."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs * keras.random.uniform((), 1, 2) if training else inputs


def no_mean(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("strategy", BOTH, ids=lambda one: type(one).__name__)
def test_a_model_with_nothing_to_train_may_lose_anything(strategy: Any) -> None:
    x = np.random.default_rng(0).normal(size=(9, 8)).astype("float32")
    found = []
    for scope in (nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(1)
        with scope:
            model = stacked(layers.Rescaling(2.0), loss=no_mean)
            noisy = stacked(Noisy(), loss=no_mean)
        found.append(fitted(model, x, x[::-1])["loss"])
        assert fitted(noisy, x, x)["loss"] > [0.0]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


@pytest.mark.parametrize("strategy", BOTH, ids=lambda one: type(one).__name__)
def test_arrays_of_bfloat16(strategy: Any) -> None:
    x = X.astype("bfloat16")
    found = []
    for scope in (nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(1)
        with scope:
            model = stacked(layers.Dense(4), layers.Dense(1), loss="mse")
        fitted(model, ((x, Y) for _ in range(2)), None, steps_per_epoch=2, batch_size=None)
        found.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-2)


class OnlyTrains(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Its loss in training is another one than in evaluation."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss * (1 + training + 2 * self.training)


def two_layers() -> tuple[Any, Any]:
    """Inputs and outputs."""
    inputs = keras.Input((8,))
    return inputs, layers.Dense(1)(layers.Dense(4)(inputs))


@pytest.mark.parametrize("strategy", BOTH, ids=lambda one: type(one).__name__)
def test_a_loss_of_ones_own_knows_whether_the_model_trains(strategy: Any) -> None:
    with strategy.scope():
        model = OnlyTrains(*two_layers())
        model.compile("sgd", "mse")
    plain = OnlyTrains(*two_layers())
    plain.compile("sgd", "mse")
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-6
    )


def test_targets_of_another_number_in_a_stream_are_refused() -> None:
    with lockstep.MirroredStrategy(devices=2).scope():
        model = stacked(layers.Dense(1), loss=lambda _, y_pred: ops.sum(y_pred))
    with pytest.raises(DataError, match=r"inputs\[0\] 8, targets\[0\] 3"):
        fitted(model, ((X[:8], Y[:3]) for _ in range(1)), None, steps_per_epoch=1, batch_size=None)


class Accumulated(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Sums over time, which is first: (time, samples, features)."""

    def call(self, inputs: Any) -> Any:
        return ops.cumsum(inputs, axis=0)


@pytest.mark.parametrize("strategy", BOTH, ids=lambda one: type(one).__name__)
def test_time_first_within_a_model(strategy: Any) -> None:
    x = (
        np.random.default_rng(0).normal(size=(4, 20, 8)).astype("float32")
    )  # time, samples, features
    found = []
    for scope in (nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(1)
        with scope:
            inputs = keras.Input((4, 8))
            hidden = layers.Dense(6)(ops.swapaxes(inputs, 0, 1))
            outputs = layers.Dense(2)(Accumulated()(hidden))
            model = keras.Model(inputs, ops.swapaxes(outputs, 0, 1))
            model.compile("sgd", "mse")
        losses = fitted(model, x.swapaxes(0, 1), x[..., :2].swapaxes(0, 1), epochs=2)["loss"]
        found.append([losses, *model.get_weights(), model.predict(x.swapaxes(0, 1), verbose=0)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
