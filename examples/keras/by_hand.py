"""Placement by hand: each layer on one of two devices, as with ``tf.device`` in tutorials.

python by_hand.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import digits
import keras
from keras import layers

(x, y), test = digits.load()

inputs = layers.Input((28, 28))
with lockstep.device(0):
    images = layers.Reshape((28, 28, 1))(inputs)
    hidden = layers.Conv2D(16, 5, strides=2, activation="relu", name="edges")(images)
    hidden = layers.Conv2D(32, 3, strides=2, activation="relu", name="shapes")(hidden)
with lockstep.device(1):
    hidden = layers.Flatten()(hidden)
    hidden = layers.Dense(128, activation="relu", name="wide")(hidden)
    outputs = layers.Dense(10, name="classes")(hidden)

with lockstep.PipelineStrategy(microbatches=4).scope():
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(x, y, batch_size=64, epochs=5, verbose=2)
accuracy = model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
print(f"accuracy {accuracy:.3f}")
assert accuracy > 0.85, "the digits were not learnt"
