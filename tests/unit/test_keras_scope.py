"""What belongs to a scope, where layers go, and what is refused."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.callbacks.progbar_logger import ProgbarLogger

import lockstep
from lockstep.errors import LockstepError, ModelError, OptionError
from lockstep.train.logging import metric_display
from tests import keras_zoo as zoo

pytestmark = pytest.mark.thorough

X, Y = zoo.vectors(20).astype("float32"), zoo.classes(20)
TWO = {"batch_size": 10, "verbose": 0}


def mirrored() -> lockstep.Strategy:
    return lockstep.MirroredStrategy(devices=2)


def stages_of(model: Any) -> dict[str, int]:
    """The stage of each layer, in the last Plan."""
    plan = model._lockstep.plan
    return {layer.name.partition("@")[0]: layer.stage for layer in plan.layers}


# --- what belongs to a scope ----------------------------------------------------------------------


def test_made_in_a_scope_and_compiled_outside() -> None:
    with mirrored().scope():
        model = zoo.sequential()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(X, Y, **TWO)
    assert model._lockstep.plan.num_ranks == 2


def test_made_outside_and_compiled_in_a_scope() -> None:
    model = zoo.sequential()
    with mirrored().scope():
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(X, Y, **TWO)
    assert model._lockstep.plan.num_ranks == 2


def test_compiled_again_in_another_scope() -> None:
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential)
    model.fit(X, Y, **TWO)
    with lockstep.MirroredStrategy(devices=3).scope():
        model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(X, Y, **TWO)
    assert model._lockstep.plan.num_ranks == 3


def test_loaded_in_a_scope(tmp_path: Any) -> None:
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential)
    model.fit(X, Y, **TWO)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    with mirrored().scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "_lockstep" not in vars(plain)
    for each in (model, plain, loaded):
        each.fit(X, Y, shuffle=False, **TWO)
    assert loaded._lockstep.plan.num_ranks == 2
    assert zoo.distance(model, plain) < 1e-6
    assert zoo.distance(model, loaded) == 0


def test_outside_of_scopes_keras_is_as_it_was() -> None:
    kinds = (keras.Model, type(zoo.sequential()))
    before = [(kind.__init__, kind.compile, kind.fit, kind.predict) for kind in kinds]
    with mirrored().scope(), lockstep.SingleDeviceStrategy().scope():
        assert keras.Model.fit is not before[0][2]
    assert [(kind.__init__, kind.compile, kind.fit, kind.predict) for kind in kinds] == before


def test_a_model_of_no_scope_is_not_trained_in_one() -> None:
    model = zoo.compiled(zoo.sequential)
    with mirrored().scope(), pytest.raises(ModelError, match="made or compiled in the scope"):
        model.fit(X, Y, **TWO)
    model.fit(X, Y, **TWO)


def test_a_trainer_of_pytorch_in_a_scope_of_the_same_script() -> None:
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential)
    assert model.fit(X, Y, **TWO).history["loss"]


# --- layers by hand -------------------------------------------------------------------------------


def test_layers_go_where_the_scope_says() -> None:
    inputs = layers.Input((8,))
    with lockstep.device(0):
        hidden = layers.Dense(4, activation="relu", name="first")(inputs)
        hidden = layers.Dense(16, activation="relu", name="second")(hidden)
        hidden = layers.Dense(16, activation="relu", name="third")(hidden)
    with lockstep.device(1):
        outputs = layers.Dense(zoo.NUM_CLASSES, name="last")(hidden)
    with lockstep.PipelineStrategy(microbatches=2).scope():
        model = zoo.compiled(lambda: keras.Model(inputs, outputs))
    model.fit(X, Y, **TWO)
    assert stages_of(model) == {"first": 0, "second": 0, "third": 0, "last": 1}


def test_layers_of_a_sequential_model_by_hand() -> None:
    model = keras.Sequential([layers.Input((8,))])
    for device in (0, 1):
        with lockstep.device(device):
            model.add(layers.Dense(8, activation="relu", name=f"layer{device}"))
    with lockstep.PipelineStrategy(microbatches=2).scope():
        model.compile("sgd", "mse")
    model.fit(X, X, **TWO)
    assert [stage for _, stage in sorted(stages_of(model).items())] == [0, 1]


# --- what users do around it ----------------------------------------------------------------------


@pytest.fixture
def mixed() -> Iterator[None]:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize(
    "strategy",
    [mirrored(), lockstep.PipelineStrategy(stages=2, microbatches=2)],
    ids=["mirrored", "pipeline"],
)
@pytest.mark.usefixtures("mixed")
def test_mixed_precision(strategy: lockstep.Strategy) -> None:
    """Rounded to eight bits, sums over shares are as far from one another as any two sums."""
    plain = zoo.compiled(zoo.sequential, optimizer="sgd")
    with strategy.scope():
        model = zoo.compiled(zoo.sequential, optimizer="sgd")
    plain.fit(X, Y, shuffle=False, **TWO)
    model.fit(X, Y, shuffle=False, **TWO)
    assert zoo.distance(plain, model) < 1e-3
    assert model.predict(X, verbose=0).dtype == plain.predict(X, verbose=0).dtype


@pytest.mark.thorough
def test_float32_as_users_run_it() -> None:
    x, y = zoo.vectors(100).astype("float32"), zoo.classes(100)
    for name, make in zoo.MODELS.items():
        plain = zoo.compiled(make)
        with lockstep.MirroredStrategy(devices=2).scope():
            model = zoo.compiled(make)
        for each in (plain, model):
            each.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        assert zoo.distance(plain, model) < 1e-5, name


def test_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    model.fit(X, Y, batch_size=10, verbose=2, validation_data=(X, Y))
    said = capsys.readouterr().out
    assert all(name in said for name in ("accuracy", "loss", "val_loss", "2/2"))


def test_the_progress_bar_moves_as_in_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, dict[str, float]]] = []
    for loop in ("train", "test"):
        monkeypatch.setattr(
            ProgbarLogger,
            f"on_{loop}_batch_end",
            lambda _, batch, logs, loop=loop: told.append((loop, batch, dict(logs))),
        )
    monkeypatch.setattr(metric_display, "_SECONDS", 1e-9)  # after every batch
    seen, histories = [], []
    for verbose, strategy in ((1, None), (1, mirrored()), (0, mirrored())):
        with nullcontext() if strategy is None else strategy.scope():
            keras.utils.set_random_seed(0)
            metrics = ["accuracy", "sparse_categorical_crossentropy"]
            model = zoo.compiled(zoo.sequential, metrics=metrics)
        fitted = model.fit(X, Y, batch_size=3, shuffle=False, verbose=verbose)
        if verbose:
            model.evaluate(X, Y, batch_size=3, verbose=1)
            told.sort(key=lambda one: (one[0] == "test", one[1]))  # Keras calls it in threads
            seen.append([logs for _, _, logs in told])
        histories.append(fitted.history)
        told.clear()
    plain, ours = seen
    assert len(plain) > 6
    assert [list(logs) for logs in ours] == [list(logs) for logs in plain]
    for own, other in zip(ours, plain, strict=True):
        assert own == pytest.approx(other, rel=1e-3)
    assert histories[1] == histories[2]  # to look changes no bit


def test_layers_have_the_names_of_their_attributes() -> None:
    names = ["kind", "num_features", "lockstep", "training", "forward"]
    model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4, name=name) for name in names)])
    found = [layer.name.rpartition(".")[2] for layer in mirrored().plan(model, batch_size=4).layers]
    assert found == [*names[:3], "training_", "forward_"]  # torch has the last two itself


def test_a_plan_without_training() -> None:
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential)
    plan = mirrored().plan(model, batch_size=10)
    model.fit(X, Y, batch_size=10, verbose=0)
    assert plan == model._lockstep.plan
    cut = lockstep.PipelineStrategy(stages=2, microbatches=2).plan(model, batch_size=10, sample=X)
    assert cut.num_ranks == 2
    with pytest.raises(ModelError, match="is not built"):
        mirrored().plan(keras.Sequential([layers.Dense(3)]), batch_size=10)
    with pytest.raises(OptionError, match="must have a dim of samples"):
        mirrored().plan(model, batch_size=10, batch_dim={"inputs": None})


# --- what is refused ------------------------------------------------------------------------------


class OwnFit(keras.Sequential):  # type: ignore[misc]  # Keras is untyped
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit(*args, **kwargs)


class OwnFunction(keras.Sequential):  # type: ignore[misc]
    def make_train_function(self, force: bool = False) -> Any:
        return super().make_train_function(force)


@pytest.mark.parametrize(
    ("kind", "said"), [(OwnFit, "own fit"), (OwnFunction, "own make_train_function.*train_step")]
)
def test_how_steps_are_run(kind: Any, said: str) -> None:
    with mirrored().scope():
        model = kind([layers.Input((8,)), layers.Dense(zoo.NUM_CLASSES)])
        model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ModelError, match=f"(?s){said}"):
        model.fit(X, Y, **TWO)


def test_compiled_by_torch() -> None:
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential, jit_compile=True)
    with pytest.warns(UserWarning, match="Proceeding with `jit_compile=False`"):
        model.fit(X, Y, **TWO)
    assert not model.jit_compile


def test_run_eagerly_is_how_it_runs_anyway() -> None:
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential, run_eagerly=True)
    assert model.fit(X, Y, **TWO).history["loss"]


def test_half_precision() -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with mirrored().scope():
            model = zoo.compiled(zoo.sequential)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    with pytest.warns(UserWarning, match="becomes mixed_bfloat16"):
        model.fit(X, Y, **TWO)
    assert {layer.compute_dtype for layer in model.layers} == {"bfloat16"}
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_thawed_without_being_compiled_again() -> None:
    with mirrored().scope():
        model = zoo.sequential()
        model.layers[0].trainable = False
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(X, Y, **TWO)
        model.layers[0].trainable = True
    with pytest.raises(ModelError, match=r"trainable since then.*kernel.*compile again"):
        model.fit(X, Y, **TWO)


def test_scaled_losses() -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential, optimizer=optimizer)
    with pytest.warns(UserWarning, match="LossScaleOptimizer"):
        model.fit(X, Y, **TWO)
    assert isinstance(model.optimizer, keras.optimizers.SGD)


def test_nothing_to_train() -> None:
    models = []
    for scope in (nullcontext(), mirrored().scope()):
        with scope:
            model = zoo.sequential()
            model.trainable = False
            zoo.set_weights(model)
            model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        with pytest.warns(UserWarning, match="does not have any trainable weights"):
            models.append(model.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history)
    for name, values in models[0].items():
        assert models[1][name] == pytest.approx(values, rel=1e-6), name


class Noise(layers.Layer):  # type: ignore[misc]
    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs))


def test_new_numbers_in_every_prediction() -> None:
    with mirrored().scope():
        model = keras.Sequential([layers.Input((8,)), Noise()])
    first, second = (model.predict(X, verbose=0) for _ in range(2))
    assert not np.isclose(first, second).any()


def test_several_steps_at_once() -> None:
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential, steps_per_execution=4)
    with pytest.raises(ModelError, match="steps_per_execution"):
        model.fit(X, Y, **TWO)


def test_a_loss_that_does_not_reduce() -> None:
    loss = keras.losses.MeanSquaredError(reduction=None)
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential, loss=loss)
    with pytest.raises(LockstepError, match="reduction"):
        model.fit(X, zoo.vectors(20, zoo.NUM_CLASSES), **TWO)


class Spread(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Adds what is neither a mean nor a sum over the samples."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.std(inputs))
        return inputs


def test_what_cannot_be_divided() -> None:
    with mirrored().scope():
        model = zoo.compiled(
            lambda: keras.Sequential([layers.Input((8,)), layers.Dense(4), Spread()])
        )
    with pytest.raises(ModelError, match="a mean or a sum over its samples"):
        model.fit(X, Y, **TWO)


def test_batch_normalization_in_microbatches_is_told_of() -> None:
    with lockstep.PipelineStrategy(stages=2, microbatches=2).scope():
        model = zoo.compiled(zoo.normalized)
    model.fit(X, Y, **TWO)
    assert "batch_normalization" in " ".join(model._lockstep.plan.notes)


class ByValue(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def call(self, x: Any) -> Any:
        return x if x.sum() > 0 else -x


class ForRealSizes(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def call(self, x: Any) -> Any:
        if type(x.shape[0]) is not int:
            raise ValueError("no such size")
        return x


@pytest.mark.filterwarnings("ignore:__index__ returned non-int:DeprecationWarning")
@pytest.mark.parametrize(
    ("first", "inputs", "reason"),
    [
        (
            [layers.Embedding(9, 4, mask_zero=True), layers.LSTM(4, name="memory")],
            zoo.classes(20)[:, None].repeat(6, 1),
            "LSTM 'memory': what it does depends on the number of samples",
        ),
        (
            [layers.SpectralNormalization(layers.Dense(4), name="norm")],
            X,
            "SpectralNormalization 'norm': uses a tensor's values outside torch (__bool__)",
        ),
        (
            [layers.Dense(4), ByValue(name="chooser")],
            X,
            "ByValue 'chooser': uses a tensor's values outside torch (__bool__)",
        ),
        (
            [layers.Dense(4), ForRealSizes(name="sized")],
            X,
            "ForRealSizes 'sized': ValueError: no such size",
        ),
    ],
    ids=["recurrent with masks", "spectral normalization", "by value", "raises"],
)
def test_the_layer_that_keeps_a_model_in_one_piece_is_named(
    first: list[Any], inputs: Any, reason: str
) -> None:
    model = keras.Sequential([layers.Input(inputs.shape[1:]), *first, layers.Dense(3)])
    plan = lockstep.PipelineStrategy(stages=2).plan(model, batch_size=10, sample=inputs)
    assert f"the model runs as one piece ({reason}" in plan.notes[0]


def test_not_compiled() -> None:
    with mirrored().scope():
        model = zoo.sequential()
    with pytest.raises(ValueError, match="compile"):
        model.fit(X, Y, **TWO)


def test_prediction_needs_no_compile() -> None:
    with mirrored().scope():
        model = zoo.Subclassed()
    outputs = model.predict(X, batch_size=7, verbose=0)
    np.testing.assert_allclose(outputs, model(X).detach(), rtol=1e-5, atol=1e-6)


def test_data_that_does_not_fit_together() -> None:
    with mirrored().scope():
        model = zoo.compiled(zoo.sequential)
    with pytest.raises(ValueError, match="cardinality"):
        model.fit(X, Y[:5], **TWO)


def test_several_hosts_need_a_strategy_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = ["10.0.0.1:1", "10.0.0.2:1"]
    task = {"type": "worker", "index": 1}
    config = json.dumps({"cluster": {"worker": workers}, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)
    with lockstep.MirroredStrategy(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
    with pytest.raises(OptionError, match=r"on one host.*TF_CONFIG.*2 hosts"):
        model.fit(np.zeros((4, 3)), np.zeros((4, 1)), verbose=0)
