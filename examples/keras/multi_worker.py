"""Several hosts by TF_CONFIG: each runs this program, and together they train one model.

TensorFlow's tutorial "Multi-worker training with Keras", on Lockstep; what differs is in
docs/migrating.md. Without TF_CONFIG it trains on this host alone.

    python multi_worker.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import json
import os

import digits
import keras

PER_WORKER_BATCH_SIZE = 32


def build_and_compile_model():
    """A small convolutional net."""
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(2e-3),
        metrics=["accuracy"],
    )
    return model


(x, y), test = digits.load()
cluster = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {"worker": ["this one"]})
strategy = lockstep.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(7)
batch_size = PER_WORKER_BATCH_SIZE * len(cluster["worker"])
with strategy.scope():
    model = build_and_compile_model()

model.fit(x, y, batch_size=batch_size, epochs=4, verbose=2)
loss, accuracy = model.evaluate(*test, verbose=0)
if strategy.is_chief:
    print(f"{batch_size} samples a step: loss {loss:.3f}, accuracy {accuracy:.3f}")
    model.save("multi_worker.keras")
assert accuracy > 0.85, "the digits were not learnt"
