"""Parameter servers: the tasks of TF_CONFIG are a chief, workers and servers ("ps").

TensorFlow's tutorial "Parameter server training", on Lockstep; what differs is in
docs/migrating.md. All tasks run this program. Without TF_CONFIG one process starts the others.

    python parameter_servers.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import digits
import keras

(x, y), _ = digits.load()
strategy = lockstep.ParameterServerStrategy(staleness=None)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(x, y, batch_size=64, epochs=5, verbose=2)
accuracy = history.history["accuracy"][-1]
if strategy.is_chief:
    print(f"accuracy of the last epoch {accuracy:.3f}")
assert accuracy > 0.85, "the digits were not learnt"
