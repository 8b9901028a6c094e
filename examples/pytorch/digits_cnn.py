"""A convolutional net learns handwritten digits on two devices, with checkpoints.

    python digits_cnn.py [--epochs 10]

Stop it with Ctrl-C, or kill it, and start it again: it resumes at the next batch and reaches the
same weights, bit for bit. Delete the folder digits_run to start over. Needs scikit-learn.
"""

import argparse
from functools import partial

import torch
import torchmetrics
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import lockstep

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=10)
epochs = parser.parse_args().epochs

images, classes = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
x, x_test, y, y_test = train_test_split(
    images, torch.tensor(classes), test_size=360, random_state=0
)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),  # statistics are those of the whole batch, over both devices
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.25),
    nn.Linear(32 * 4 * 4, 10),
)
trainer = lockstep.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=partial(torch.optim.AdamW, lr=2e-3),
    metrics={"accuracy": torchmetrics.Accuracy("multiclass", num_classes=10)},
    strategy=lockstep.MirroredStrategy(devices=2),
)
history = trainer.fit(
    (x, y),
    epochs=epochs,
    batch_size=64,
    validation_data=(x_test, y_test),
    checkpoint=lockstep.Checkpoint("digits_run", every="10 steps"),
)
print(f"loss of each epoch: {', '.join(f'{loss:.3f}' for loss in history.history['loss'])}")

found = trainer.predict(x_test).argmax(1)
wrong = (found != y_test).nonzero().flatten().tolist()
print(f"{len(wrong)} of {len(y_test)} test digits are taken for another", end="")
print("".join(f"\n  a {y_test[i]} for a {found[i]}" for i in wrong[:5]))
