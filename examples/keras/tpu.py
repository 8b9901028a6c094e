"""Data parallel on the TPUs of this host.

TensorFlow's guide "Use TPUs", on Lockstep; what differs is in docs/migrating.md.

    python tpu.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import digits
import keras

resolver = lockstep.TPUClusterResolver(tpu="")
lockstep.initialize_tpu_system(resolver)
strategy = lockstep.TPUStrategy(resolver)
print(f"{strategy.num_replicas_in_sync} TPUs")
keras.utils.set_random_seed(7)

(x, y), test = digits.load()


def create_model():
    """A small model."""
    return keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


with strategy.scope():
    model = create_model()
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(x, y, batch_size=100, epochs=4, validation_data=test, verbose=2)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"test loss {loss:.3f}, accuracy {accuracy:.3f}")
assert accuracy > 0.85, "the digits were not learnt"
