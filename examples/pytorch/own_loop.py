"""A loop of your own, from a script for DistributedDataParallel.

    lockstep run --processes 2 own_loop.py [--epochs 20]

Every process runs the script; python own_loop.py is one replica. What has changed:

    -dist.init_process_group("gloo")
    +lockstep.init()
    -model = DistributedDataParallel(model)
     optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    +optimizer = lockstep.CrossReplicaOptimizer(optimizer, model, clip_norm=1.0)
    -sampler = DistributedSampler(dataset); loader = DataLoader(dataset, 32, sampler=sampler)
    +loader = DataLoader(dataset, 64, shuffle=True, generator=...)    # the global batch
     for batch in loader:
    -    images, classes = batch
    +    images, classes = lockstep.share(batch)
         ...
    -    clip_grad_norm_(model.parameters(), 1.0); optimizer.step()
    +    optimizer.step(weight=len(images))
    -if dist.get_rank() == 0:
    +if lockstep.rank() == 0:

Any number of processes gives the weights of one: no sample is repeated, short batches weigh less,
and clipping uses the norm of the whole gradient. Needs scikit-learn.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=20)
epochs = parser.parse_args().epochs

images, classes = load_digits(return_X_y=True)
images, classes = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes)
dataset = TensorDataset(images[360:], classes[360:])
loader = DataLoader(
    dataset, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)
)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)

lockstep.init()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = lockstep.CrossReplicaOptimizer(optimizer, model, clip_norm=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
for epoch in range(epochs):
    total = 0.0
    for batch in loader:
        images_here, classes_here = lockstep.share(batch)
        loss = nn.functional.cross_entropy(model(images_here), classes_here)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(weight=len(images_here))
        total += lockstep.all_mean(loss.item(), weight=len(images_here)) * len(batch[0])
    schedule.step()
    if lockstep.rank() == 0:
        print(f"epoch {epoch + 1:2}/{epochs}  loss {total / len(dataset):.4f}")

if lockstep.rank() == 0:
    with torch.no_grad():
        accuracy = (model(images[:360]).argmax(1) == classes[:360]).float().mean()
    print(f"{lockstep.num_replicas()} replicas, accuracy {accuracy:.1%} on 360 held-out digits")
    torch.save(model.state_dict(), "digits.pt")
