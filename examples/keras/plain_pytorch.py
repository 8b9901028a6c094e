"""The training of ``hybrid.py``, data and model parallel, for a plain PyTorch model.

python plain_pytorch.py [folder of MNIST]
"""

from functools import partial

import digits
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import lockstep


class Block(nn.Module):
    """A layer with a skip connection."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, inputs):
        """The inputs plus the layer's outputs."""
        return inputs + self.layer(inputs)


train, test = digits.load()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(784, 256),
    nn.ReLU(),
    *(Block(256) for _ in range(3)),
    nn.Linear(256, 10),
)
trainer = lockstep.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
    strategy=lockstep.HybridStrategy(data=2, pipe=2, microbatches=4),
)
trainer.fit(train, batch_size=128, epochs=4, validation_data=test)
print(trainer.plan)
accuracy = trainer.evaluate(test, batch_size=128)["accuracy"]
print(f"accuracy {accuracy:.3f}")
assert accuracy > 0.85, "the digits were not learnt"
