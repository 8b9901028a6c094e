"""A loop of your own on several devices, with Keras's optimizer in a CrossReplicaOptimizer.

TensorFlow's tutorial "Custom training with tf.distribute.Strategy", on Lockstep; what differs is in
docs/migrating.md. Every process runs the loop, each on its part of the batches.

    lockstep run --processes 2 own_loop.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import digits
import keras
from torch.utils.data import DataLoader, StackDataset

train, test = digits.load()
GLOBAL_BATCH_SIZE = 64
train_dataset = DataLoader(StackDataset(*train), GLOBAL_BATCH_SIZE)


def create_model():
    """A small convolutional net."""
    return keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


strategy = lockstep.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(7)
with strategy.scope():
    model = create_model()
    optimizer = lockstep.CrossReplicaOptimizer(keras.optimizers.Adam(2e-3), model)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def compute_loss(labels, predictions):
    """The mean of a replica's samples."""
    per_example_loss = loss_object(labels, predictions)
    return keras.ops.mean(per_example_loss)


def train_step(inputs):
    """One update; returns the loss of this replica's samples."""
    images, labels = inputs
    predictions = model(images, training=True)
    loss = compute_loss(labels, predictions)
    loss.backward()
    optimizer.step(weight=len(labels))
    return loss


def distributed_train_step(batch):
    """One update by all replicas; returns the loss of the batch."""
    images, labels = lockstep.share(batch)
    return lockstep.all_mean(train_step((images, labels)).item(), weight=len(labels))


losses = []
for _ in range(4):
    for batch in strategy.experimental_distribute_dataset(train_dataset):
        losses.append(float(distributed_train_step(batch)))

images, labels = test
predictions = keras.ops.convert_to_numpy(model(images))
accuracy = (predictions.argmax(1) == labels).mean()
if strategy.is_chief:
    print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}, accuracy {accuracy:.3f}")
assert accuracy > 0.85, "the digits were not learnt"
