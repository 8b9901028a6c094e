"""A fit in processes that a launcher has started, each with a TPU; tells what ``own_loop`` does."""

import json
import sys

import lockstep
from tests.tpu.training import fit, make_trainer, plain
from tests.zoo import case

if __name__ == "__main__":
    lockstep.initialize_tpu_system()
    strategy = lockstep.MultiWorkerMirroredStrategy()
    one = case("mlp")
    states, expected = fit(one, make_trainer(one, strategy)), plain(one)
    found = {
        name: float((states[name] - value).norm() / value.norm())
        for name, value in expected.items()
    }
    told = {"loop": "fit", "replicas": strategy.num_replicas_in_sync, "found": found}
    sys.stdout.write(f"{json.dumps(told)}\n")
