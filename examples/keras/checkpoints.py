"""A checkpoint every epoch, and a second run that resumes from the newest one.

Both runs are this program, which trains the remaining epochs. Together they give the weights of one
run of all epochs, also on another number of devices.

    python checkpoints.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import tempfile
from pathlib import Path

import digits
import keras
import numpy as np

(x, y), test = digits.load()
EPOCHS = 4


def make_model():
    """The model, with initial weights from the seed."""
    with lockstep.MirroredStrategy(devices=2).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((28, 28)),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def run(folder, last_epoch):
    """Train up to an epoch, from the newest checkpoint if there is one."""
    keras.utils.set_random_seed(7)  # orders and random numbers depend on it, in a resumed run, too
    found = sorted(folder.glob("epoch-*.keras"))
    first_epoch = len(found)
    if found:
        with lockstep.MirroredStrategy(devices=2).scope():
            model = keras.models.load_model(found[-1])
        print(f"going on from {found[-1].name}")
    else:
        model = make_model()
    saving = keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch:02d}.keras")
    model.fit(
        x,
        y,
        batch_size=100,
        initial_epoch=first_epoch,
        epochs=last_epoch,
        callbacks=[saving],
        verbose=2,
    )
    return model


with tempfile.TemporaryDirectory() as folder:
    run(Path(folder), EPOCHS // 2)
    continued = run(Path(folder), EPOCHS)

keras.utils.set_random_seed(7)
whole = make_model()
whole.fit(x, y, batch_size=100, epochs=EPOCHS, verbose=0)
same = zip(continued.get_weights(), whole.get_weights(), strict=True)
assert all(np.array_equal(one, other) for one, other in same), "the runs do not continue"
print("two runs gave the weights of one, bit by bit")
