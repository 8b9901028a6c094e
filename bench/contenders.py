"""One contender training one net for a while; prints its figures as a line of JSON.

Run by ``bench/data_parallel.py``, once per round, contender and net:
``python bench/contenders.py ddp mlp --seconds 3``. Every contender uses two cores, the same data
held in memory, the same batches, Adam. Warm-up steps are not counted.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch_contenders as plain
import trainer_contenders as trainers
from nets import NETS

HERE = Path(__file__).parent
ALL_NETS = tuple(NETS)
LARGE_NETS = ("wide", "cnn", "gpt")

Figures = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        run: (net's name, seconds) -> samples per second, loss, bytes.
        settings: in one line, for the report.
        packages: what must be installed for it besides torch.
        nets: which it trains.
    """

    run: Callable[[str, float], Figures]
    settings: str
    packages: tuple[str, ...] = ()
    nets: tuple[str, ...] = ALL_NETS

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]


def lockstep(net_name: str, seconds: float, precision: str = "fp32", **options: Any) -> Figures:
    from lockstep_contenders import train  # only here: no other contender's memory is to hold it

    return train(net_name, seconds, precision, **options)


def bare_ddp(net_name: str, seconds: float) -> Figures:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return last_line([*launcher, HERE / "bare_ddp.py", net_name, "--seconds", seconds])


def keras(net_name: str, seconds: float, backend: str, devices: int, threads: int = 1) -> Figures:
    net = NETS[net_name]
    inputs, targets = net.make_data(net.num_samples)
    if net_name == "cnn":
        inputs = inputs.permute(0, 2, 3, 1).contiguous()  # channels last, as Keras has them
    num_weights = sum(parameter.numel() for parameter in net.make_model().parameters())
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        np.savez(data, inputs=inputs.numpy(), targets=targets.numpy(), num_weights=num_weights)
        where = [HERE / "keras_contenders.py", backend, net_name, data, "--devices", devices]
        size = ["--threads", threads, "--batch-size", net.batch_size]
        return last_line([*where, *size, "--seconds", seconds])


def last_line(arguments: list[object]) -> Figures:
    """The figures that a script prints last."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise RuntimeError(last_error(done.stderr))
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def last_error(text: str) -> str:
    """The last line that names an error, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|F\d{4} ", line)]
    return (errors or lines or ["no message"])[-1]


CONTENDERS = {
    "lockstep": Contender(
        partial(lockstep, precision="fp32"), "`Trainer.fit` under `MirroredStrategy(2)`"
    ),
    "lockstep over gloo": Contender(
        partial(lockstep, precision="fp32", engine="gloo"),
        '`MirroredStrategy(2, engine="gloo")`: every replica has parameters of its own',
    ),
    "lockstep bf16-mixed": Contender(
        partial(lockstep, precision="bf16-mixed"),
        'the same with `precision="bf16-mixed"`',
        nets=LARGE_NETS,
    ),
    "lockstep compiled": Contender(partial(lockstep, is_compiled=True), "with `compile=True`"),
    "ddp compiled": Contender(
        partial(plain.distributed, train=plain.train_ddp_compiled), "DDP of `torch.compile(model)`"
    ),
    "ddp": Contender(
        partial(plain.distributed, train=plain.train_ddp),
        "2 processes, gloo, `gradient_as_bucket_view`, `static_graph`",
    ),
    "ddp, memory kept": Contender(
        partial(plain.distributed, train=plain.train_ddp_keeping_memory),
        "the same with Lockstep's settings of the memory allocator",
    ),
    "ddp bf16": Contender(
        partial(plain.distributed, train=plain.train_ddp_bf16),
        "`ddp` with the forward pass under `torch.autocast`, the loss in float32",
        nets=LARGE_NETS,
    ),
    "fsdp2": Contender(
        partial(plain.distributed, train=plain.train_fsdp2),
        "`fully_shard` on every layer, of the GPT on every block, 2 processes, gloo",
    ),
    "accelerate": Contender(
        partial(plain.distributed, train=trainers.train_accelerate),
        "`prepare(model, optimizer)`, 2 CPU processes, gloo, the same settings of DDP",
        packages=("accelerate",),
    ),
    "lightning": Contender(
        partial(plain.distributed, train=trainers.train_lightning),
        "`DDPStrategy`, 2 CPU processes, gloo, the same settings of DDP; no logger, checkpoints "
        "or display",
        packages=("lightning",),
    ),
    "tensorflow": Contender(
        partial(keras, backend="tensorflow", devices=2),
        "Keras `fit` under `MirroredStrategy` on 2 logical CPU devices; cached, batched, "
        "prefetched `tf.data`; channels last",
        packages=("tensorflow", "keras"),
    ),
    "tensorflow, one device": Contender(
        partial(keras, backend="tensorflow", devices=1),
        "the same on one CPU device with both cores",
        packages=("tensorflow", "keras"),
    ),
    "keras on jax": Contender(
        partial(keras, backend="jax", devices=2),
        "Keras `fit` under `keras.distribution.DataParallel` on 2 CPU devices, jit",
        packages=("jax", "keras"),
    ),
    "keras on jax, one device": Contender(
        partial(keras, backend="jax", devices=1),
        "the same on one CPU device with both cores",
        packages=("jax", "keras"),
    ),
    "keras on lockstep": Contender(
        partial(keras, backend="torch", devices=2),
        "Keras `fit` of a model of `MirroredStrategy(2).scope()`",
        packages=("keras",),
    ),
    "keras on torch, 1 thread": Contender(
        partial(keras, backend="torch", devices=1, threads=1),
        "Keras `fit` on its PyTorch backend, one core",
        packages=("keras",),
    ),
    "keras on torch, 2 threads": Contender(
        partial(keras, backend="torch", devices=1, threads=2),
        "the same with torch's own threads on both cores",
        packages=("keras",),
    ),
    "one process, 1 thread": Contender(
        partial(plain.one_process, threads=1), "hand-written loop, one core"
    ),
    "one process, 2 threads": Contender(
        partial(plain.one_process, threads=2),
        "hand-written loop, torch's own threads on both cores",
    ),
    "two cores apart": Contender(
        partial(plain.distributed, train=plain.train_apart),
        "`ddp` without DDP: each core trains a model of its own, the limit of what two cores make",
    ),
    "bare ddp": Contender(bare_ddp, "`bench/bare_ddp.py` under torchrun, to check `ddp` with"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("net", choices=NETS)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    print(json.dumps(CONTENDERS[options.contender].run(options.net, options.seconds)))


if __name__ == "__main__":
    main()
