"""A script on two hosts that calls ``fit`` twice, with a proxy between them.

Argument: the proxy's port.
"""

import hashlib
import json
import os
import sys
from functools import partial

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import HostError
from tests.launching import be_strict
from tests.proxy import detour

SECONDS = 60.0


def tell(*values: str) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    be_strict()
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        detour(pytest.MonkeyPatch(), int(sys.argv[1]))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 200), nn.Tanh(), nn.Linear(200, 200), nn.Linear(200, 4))
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.MultiWorkerMirroredStrategy(timeout_seconds=SECONDS),
    )
    x, y = torch.randn(64, 32), torch.randint(4, (64,))
    try:
        for _ in range(2):
            trainer.fit((x, y), batch_size=16, epochs=2, verbose=0)
            whole = b"".join(each.numpy().tobytes() for each in model.state_dict().values())
            tell("weights", hashlib.sha256(whole).hexdigest())
    except HostError as error:
        tell(type(error).__name__, str(error))
        raise


main()
