"""DDP without our harness: what ``bench/contenders.py ddp`` is checked against.

Shares only the nets with it. Prints rank 0's figures as a line of JSON. Run:
``python -m torch.distributed.run --nproc-per-node 2 bench/bare_ddp.py mlp --seconds 3``
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from nets import NETS

parser = argparse.ArgumentParser()
parser.add_argument("net", choices=NETS)
parser.add_argument("--seconds", type=float, default=3.0)
options = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
net = NETS[options.net]
model = torch.nn.parallel.DistributedDataParallel(
    net.make_model(), gradient_as_bucket_view=True, static_graph=True
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
inputs, targets = net.make_data(net.num_samples)
local = net.batch_size // 2
order = torch.randperm(net.num_samples, generator=torch.Generator().manual_seed(0))
parts = order.split(local)[dist.get_rank() :: 2]


def train(steps: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for step in range(steps):
        rows = parts[step % len(parts)]
        optimizer.zero_grad()
        loss = net.loss(model(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        loss.item()
    dist.barrier()
    return time.perf_counter() - began


train(5)
steps = torch.tensor([max(3, round(options.seconds / train(1)))])
dist.broadcast(steps, 0)
elapsed = train(int(steps.item()))
if dist.get_rank() == 0:
    print(json.dumps({"samples_per_second": int(steps.item()) * net.batch_size / elapsed}))
dist.destroy_process_group()
