"""Data parallel: an MLP on two devices, with validation and a test.

python mirrored_mlp.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import digits
import keras

(x, y), test = digits.load()
strategy = lockstep.MirroredStrategy(devices=2)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )

print(f"{strategy.num_replicas_in_sync} replicas, each with half of every batch of 128")
history = model.fit(x, y, batch_size=128, epochs=5, validation_split=0.1, verbose=2)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"test loss {loss:.3f}, accuracy {accuracy:.3f}")
assert accuracy > 0.85, "the digits were not learnt"
