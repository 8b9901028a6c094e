"""Data and model parallel at once: a pipeline of two stages, twice, on four devices.

python hybrid.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import digits
import keras
from keras import layers

(x, y), test = digits.load()
strategy = lockstep.HybridStrategy(data=2, pipe=2, microbatches=4)

with strategy.scope():
    inputs = layers.Input((28, 28))
    hidden = layers.Dense(256, activation="relu")(layers.Flatten()(inputs))
    for _ in range(3):  # blocks with a way around them
        block = layers.Dense(256, activation="relu")(layers.LayerNormalization()(hidden))
        hidden = layers.Add()([hidden, block])
    model = keras.Model(inputs, layers.Dense(10)(hidden))
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(x, y, batch_size=128, epochs=4, validation_data=test, verbose=2)
accuracy = model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
print(f"accuracy {accuracy:.3f}")
assert accuracy > 0.85, "the digits were not learnt"
