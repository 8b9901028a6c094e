"""A loop of one's own that changes its optimizer's state; its argument is the engine."""

import sys

import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError

lockstep.init(timeout_seconds=60, engine=None if sys.argv[1] == "shared" else sys.argv[1])
torch.manual_seed(0)
model = nn.Linear(16, 3)
adam = torch.optim.Adam(model.parameters(), lr=0.1)
optimizer = lockstep.CrossReplicaOptimizer(adam, model)


def step() -> None:
    inputs = lockstep.share(torch.ones(4, 16))
    model(inputs).square().mean().backward()
    optimizer.step(weight=len(inputs))


for _ in range(3):
    step()
state = optimizer.state_dict()
for slots in state["state"].values():
    slots["exp_avg"] = torch.zeros_like(slots["exp_avg"])
optimizer.load_state_dict(state)
loaded = optimizer.state_dict()["state"]
assert len(loaded) == 2
assert not any(slots["exp_avg"].any() for slots in loaded.values())
try:
    optimizer.state.clear()
except OptionError as error:
    sys.stdout.write(str(error))
