"""Checkpoints of a training on several devices, and a second run that goes on from the newest.

Keras's guide "Multi-GPU distributed training with TensorFlow", on Lockstep; what differs is in
docs/migrating.md. Both runs are one function, which trains the remaining epochs. Together they give
the weights of one run of all epochs, also on another number of devices.

    python checkpoints.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import os
import tempfile

import digits
import keras
import numpy as np

train, test = digits.load()


def get_compiled_model():
    """A new model, with initial weights from the seed."""
    inputs = keras.Input((28, 28))
    hidden = keras.layers.Dense(128, activation="relu")(keras.layers.Flatten()(inputs))
    hidden = keras.layers.Dropout(0.2)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model


def run_training(folder, epochs):
    """Train up to an epoch, from the newest checkpoint if the folder has one."""
    keras.utils.set_random_seed(7)  # a run that goes on draws its numbers from it, too
    strategy = lockstep.MirroredStrategy(devices=2)
    print(f"{strategy.num_replicas_in_sync} devices")
    saved = sorted(os.listdir(folder))
    with strategy.scope():
        if saved:
            print(f"going on from {saved[-1]}")
            model = keras.models.load_model(os.path.join(folder, saved[-1]))
        else:
            model = get_compiled_model()
        path = os.path.join(folder, "epoch-{epoch:03d}.keras")
        model.fit(
            *train,
            batch_size=100,
            initial_epoch=len(saved),
            epochs=epochs,
            validation_data=test,
            callbacks=[keras.callbacks.ModelCheckpoint(path)],
            verbose=2,
        )
        loss, accuracy = model.evaluate(*test, verbose=0)
    print(f"test loss {loss:.3f}, accuracy {accuracy:.3f}")
    return model


with tempfile.TemporaryDirectory() as folder:
    run_training(folder, epochs=2)
    continued = run_training(folder, epochs=4).get_weights()
with tempfile.TemporaryDirectory() as folder:
    whole = run_training(folder, epochs=4).get_weights()
largest = max(np.abs(one - other).max() for one, other in zip(continued, whole, strict=True))
print(f"two runs and one differ by {largest} at most")
assert largest == 0
