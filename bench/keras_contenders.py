"""Contenders that train with Keras: on TensorFlow, JAX or PyTorch, on two devices or on one.

A script of its own, so that no torch is in the process whose memory is counted, where it is not the
backend. On PyTorch two devices are Lockstep's, and one has as many threads as it is given. Data is
given in the form that is fastest for each backend: to PyTorch, with Lockstep or without, arrays.
The contender's process hands it the data and the number of weights that the same net has in torch:
``python bench/keras_contenders.py tensorflow mlp data.npz --devices 2``.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
WARM_UP_STEPS = 5
MOST_STEPS = 120  # of an epoch over arrays

# What ``fit`` is given for an epoch of so many steps.
Feed = Callable[[int], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["tensorflow", "jax", "torch"])
    parser.add_argument("net", choices=["mlp", "wide", "cnn", "gpt"])
    parser.add_argument("data")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    os.environ.update(KERAS_BACKEND=options.backend, TF_CPP_MIN_LOG_LEVEL="2")
    with np.load(options.data) as data:
        inputs, targets, num_weights = data["inputs"], data["targets"], int(data["num_weights"])
    setups: dict[str, Callable[..., tuple[Any, Feed]]] = {
        "tensorflow": on_tensorflow,
        "jax": on_jax,
        "torch": partial(on_torch, num_threads=options.threads),
    }
    model, feed = setups[options.backend](
        options.net, inputs, targets, options.batch_size, options.devices
    )
    if model.count_params() != num_weights:
        sys.exit(f"{model.count_params()} weights in Keras, {num_weights} in torch")
    print(json.dumps(train(model, feed, options.batch_size, options.seconds)))


def on_tensorflow(
    net: str, inputs: Array, targets: Array, batch_size: int, num_devices: int
) -> tuple[Any, Feed]:
    """The compiled model and an endless data set, under MirroredStrategy."""
    import tensorflow as tf

    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(num_devices)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(num_devices)])
    with strategy.scope():
        model = compiled(net, jit=False)  # XLA is slower here, and fails on two devices
    data = tf.data.Dataset.from_tensor_slices((inputs, targets))
    batches = data.batch(batch_size, drop_remainder=True).cache().repeat()
    ahead = batches.prefetch(tf.data.AUTOTUNE)
    return model, lambda steps: {"x": ahead, "steps_per_epoch": steps}


def on_jax(
    net: str, inputs: Array, targets: Array, batch_size: int, num_devices: int
) -> tuple[Any, Feed]:
    """The compiled model and endless batches, under DataParallel where devices are several."""
    if num_devices > 1:
        # With a thread per device the devices wait for each other for ever; with more, each
        # operation must keep to one of them.
        os.environ["NPROC"] = str(2 * num_devices)
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    import jax

    jax.config.update("jax_num_cpu_devices", num_devices)
    import keras

    if num_devices > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    parts = [
        (inputs[start : start + batch_size], targets[start : start + batch_size])
        for start in range(0, len(inputs), batch_size)
    ]

    def batches() -> Any:
        while True:
            yield from parts

    return compiled(net, jit=True), lambda steps: {"x": batches(), "steps_per_epoch": steps}


def on_torch(
    net: str, inputs: Array, targets: Array, batch_size: int, num_devices: int, num_threads: int
) -> tuple[Any, Feed]:
    """The compiled model, under Lockstep where devices are several, and arrays."""
    import torch

    torch.set_num_threads(num_threads)
    if num_devices == 1:
        model = compiled(net, jit=False)
    else:
        import lockstep

        with lockstep.MirroredStrategy(devices=num_devices).scope():
            import keras  # noqa: F401  # hooked in the scope

            model = compiled(net, jit=False)

    def arrays(steps: int) -> dict[str, Any]:
        in_pass = min(steps, MOST_STEPS)
        indices = np.arange(in_pass * batch_size) % len(inputs)
        return {
            "x": inputs[indices],
            "y": targets[indices],
            "batch_size": batch_size,
            "epochs": -(-steps // in_pass),
        }

    return model, arrays


def compiled(net: str, jit: bool) -> Any:
    import keras

    model = NETS[net]()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit,
    )
    return model


def train(model: Any, feed: Feed, batch_size: int, seconds: float) -> dict[str, float]:
    """Compile and warm up, guess the time of a step, then as many steps as fill the time."""
    run_steps(model, feed(WARM_UP_STEPS), batch_size)
    per_second, _ = run_steps(model, feed(WARM_UP_STEPS), batch_size)
    steps = max(3, round(seconds * per_second / batch_size))
    samples_per_second, loss = run_steps(model, feed(steps), batch_size)
    return {
        "samples_per_second": samples_per_second,
        "loss": loss,
        "bytes": own_pss_bytes(),
    }


def run_steps(model: Any, data: dict[str, Any], batch_size: int) -> tuple[float, float]:
    """Samples per second from the first epoch's begin to the last one's end, and its mean loss."""
    import keras

    times: list[float] = []
    losses: list[float] = []

    def end(_: int, logs: dict[str, float]) -> None:
        losses.append(logs["loss"])
        times.append(time.perf_counter())

    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: times.append(time.perf_counter()), on_epoch_end=end
    )
    model.fit(**data, verbose=0, shuffle=False, callbacks=[clock])
    steps = data.get("steps_per_epoch") or data["epochs"] * len(data["x"]) // batch_size
    return steps * batch_size / (times[-1] - times[0]), losses[-1]


def own_pss_bytes() -> float:
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024.0 for line in rollup if line.startswith("Pss:"))


# --- the nets of nets.py, with Keras's layers -----------------------------------------------------


def perceptron(width: int) -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def convolutional() -> Any:
    import keras

    def convolution(channels: int) -> Any:
        return keras.layers.Conv2D(channels, 3, padding="same", activation="relu")

    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            convolution(32),
            keras.layers.MaxPooling2D(2),
            convolution(64),
            keras.layers.MaxPooling2D(2),
            convolution(64),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def language_model() -> Any:
    import keras
    from keras import layers

    num_layers, width, num_heads, num_tokens = 6, 256, 8, 128

    class AddPosition(keras.layers.Layer):  # type: ignore[misc]  # Keras is not installed for mypy
        def build(self, shape: tuple[int, ...]) -> None:
            self.positions = self.add_weight(shape=shape[1:], initializer="normal")

        def call(self, x: Any) -> Any:
            return x + self.positions

    def block(x: Any) -> Any:
        attention = layers.MultiHeadAttention(num_heads, width // num_heads)
        normalised = layers.LayerNormalization()(x)
        x = layers.add([x, attention(normalised, normalised, use_causal_mask=True)])
        fed = layers.LayerNormalization()(x)
        fed = layers.Dense(4 * width, activation="gelu")(fed)
        return layers.add([x, layers.Dense(width)(fed)])

    tokens = keras.Input((num_tokens,), dtype="int32")
    x = AddPosition()(layers.Embedding(256, width)(tokens))
    for _ in range(num_layers):
        x = block(x)
    logits = layers.Dense(256, use_bias=False)(layers.LayerNormalization()(x))
    return keras.Model(tokens, logits)


NETS: dict[str, Callable[[], Any]] = {
    "mlp": partial(perceptron, 256),
    "wide": partial(perceptron, 4096),
    "cnn": convolutional,
    "gpt": language_model,
}

if __name__ == "__main__":
    main()
