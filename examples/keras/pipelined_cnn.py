"""Model parallel: a convolutional net whose layers are divided between two devices.

Lockstep chooses the cuts by the layers' time on this machine.

    python pipelined_cnn.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import digits
import keras
from keras import layers

(x, y), test = digits.load()
strategy = lockstep.PipelineStrategy(stages=2, microbatches=4)

with strategy.scope():
    model = keras.Sequential(
        [
            layers.Input((28, 28)),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(x, y, batch_size=64, epochs=4, validation_data=test, verbose=2)
accuracy = model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
print(f"accuracy {accuracy:.3f}")
assert accuracy > 0.85, "the digits were not learnt"
