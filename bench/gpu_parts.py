"""The parts of ``bench/gpu.py``, each in a process of its own: what is timed, and against what.

A part makes its contenders one after the other and prints the figures of each as it has them: so
one that fails, or finds no time, costs no other's.
"""

import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from gpu_nets import GPT, GPTSize, gpt_flops, resnet
from torch import Tensor, nn

import lockstep
from lockstep.cluster.devices import discover

Figures = dict[str, Any]

_FOUND = discover().hosts[0].accelerators
HAS_DEVICE = bool(_FOUND)
DEVICE = _FOUND[0].name if _FOUND else "cpu"
KIND = DEVICE.partition(":")[0]


class Clock:
    """Times epochs after the first, in which things are compiled and memory is found."""

    epochs = 3

    def __init__(self) -> None:
        self._times: list[float] = []

    def end_epoch(self) -> None:
        if HAS_DEVICE:
            torch.accelerator.synchronize()
        self._times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of the faster epoch."""
        return min(ended - began for began, ended in pairwise(self._times))


class SyncClock:
    """Has CUDA warn of every wait of the host for the device in the second of two epochs."""

    epochs = 2

    def __init__(self) -> None:
        self._modes = iter(("warn", "default"))

    def end_epoch(self) -> None:
        torch.cuda.set_sync_debug_mode(next(self._modes))


# Trains for as many epochs as a clock has, and tells it of the end of each.
Train = Callable[[Any], None]
Contender = Callable[[], Train]


def measured(make: Contender, steps: int) -> Figures:
    """Seconds of a step, and the most memory that its tensors took, beside what was there."""
    before = torch.accelerator.memory_allocated() if HAS_DEVICE else 0
    if HAS_DEVICE:
        torch.accelerator.reset_peak_memory_stats()
    train, clock = make(), Clock()
    train(clock)
    peak = torch.accelerator.max_memory_allocated() if HAS_DEVICE else 0
    found: Figures = {"seconds": clock.seconds / steps, "peak_bytes": peak - before}
    if KIND == "cuda":
        found["waits"] = waits_of(train) / steps
    return found


def waits_of(train: Train) -> int:
    """How often the host waits for the device in an epoch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(SyncClock())
    waits = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    return len(waits)


def measure_each(
    contenders: dict[str, Contender], steps: int, per_step: int, **more: float
) -> None:
    """Measure contenders, and print a line of JSON for each.

    Args:
        contenders: by name.
        steps: of an epoch.
        per_step: samples, or tokens, of a step.
        more: figures that all have.
    """
    for name, make in contenders.items():
        try:
            found = measured(make, steps)
            found |= {"per_second": per_step / found["seconds"], **more}
        except Exception as error:  # the report says so, and the others go on
            found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps({"contender": name, **found}), flush=True)
        torch.compiler.reset()
        gc.collect()


# --- ways to train --------------------------------------------------------------------------------


def loop(loss_of: Callable[[Tensor], Tensor], count: int, batch_size: int, optimizer: Any) -> Train:
    """A loop as one writes it by hand: shuffled samples, and no wait for the device."""

    def train(clock: Any) -> None:
        for _ in range(clock.epochs):
            for rows in torch.randperm(count, device=DEVICE).split(batch_size):
                optimizer.zero_grad(set_to_none=True)
                loss_of(rows).backward()
                optimizer.step()
            clock.end_epoch()

    return train


def fit(trainer: Any, data: Any, batch_size: int) -> Train:
    """The same by a Trainer."""

    class EpochEnds(lockstep.Callback):
        def __init__(self, clock: Any) -> None:
            self.clock = clock

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            self.clock.end_epoch()

    def train(clock: Any) -> None:
        trainer.callbacks = [EpochEnds(clock)]
        trainer.fit(data, batch_size=batch_size, epochs=clock.epochs, verbose=0)

    return train


def cast() -> torch.autocast:
    """To bfloat16, as one casts in a loop."""
    return torch.autocast(KIND, dtype=torch.bfloat16)


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone, over the backend of the device."""
    backend = "nccl" if KIND == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]  # exported at run time
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_loops(
    make_model: Callable[[], Any],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    train_with: Callable[[Any, Any], Train],
    finished: Callable[[Any], Any] = lambda model: model,
) -> dict[str, Contender]:
    """A hand-written loop, the same with ``CrossReplicaOptimizer``, and with DDP.

    Args:
        make_model: makes the model, on the device.
        make_optimizer: makes an optimizer of its parameters.
        train_with: makes the loop, with a model and an optimizer.
        finished: what is done to the model last, such as ``torch.compile``.
    """

    def by_hand() -> Train:
        model = make_model()
        return train_with(finished(model), make_optimizer(model.parameters()))

    def by_own_loop() -> Train:
        model = make_model()
        optimizer = lockstep.CrossReplicaOptimizer(make_optimizer(model.parameters()), model)
        return train_with(finished(model), optimizer)

    def by_ddp() -> Train:
        model = make_model()
        replica = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
        return train_with(finished(replica), make_optimizer(model.parameters()))

    return {"loop": by_hand, "own loop": by_own_loop, "DDP": by_ddp}


# --- the parts ------------------------------------------------------------------------------------


def gpt(tiny: bool) -> None:
    """GPT-2 124M, 1,024 tokens, bf16, compiled."""
    small = GPTSize(layers=2, heads=2, width=64, context=32, words=512, batch_size=4)
    size = small if tiny else GPTSize()
    batch_size, steps = size.batch_size, 2 if tiny else 12
    adam = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    count = steps * batch_size
    tokens = torch.randint(size.words, (count, size.context + 1), device=DEVICE)

    def model() -> GPT:
        return GPT(size).to(DEVICE)

    def train_with(model: Any, optimizer: Any) -> Train:
        def loss_of(rows: Tensor) -> Tensor:
            with cast():
                found: Tensor = model(tokens[rows, :-1], tokens[rows, 1:])
            return found

        return loop(loss_of, count, batch_size, optimizer)

    def by_fsdp() -> Train:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh(KIND, (1,))
        net = model()
        for block in net.blocks:
            block.compile()
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return train_with(net, adam(net.parameters()))

    def by_fit(**options: Any) -> Train:
        trainer = lockstep.Trainer(
            GPT(size),
            loss=lockstep.OwnLoss(),
            optimizer=adam,
            strategy=lockstep.SingleDeviceStrategy(DEVICE),
            precision="bf16-mixed",
            compile=True,
            **options,
        )
        return fit(trainer, ((tokens[:, :-1], tokens[:, 1:]),), batch_size)

    torch.set_float32_matmul_precision("high")
    loops = in_loops(model, adam, train_with, torch.compile)
    ours: dict[str, Contender] = {
        "loop": loops["loop"],
        "fit": by_fit,
        "fit, unchecked": partial(by_fit, on_nonfinite="ignore"),
        "own loop": loops["own loop"],
    }
    per_step = batch_size * size.context
    measure_each(ours, steps, per_step, flops_each=gpt_flops(size))
    with one_process():
        measure_each(
            {"DDP": loops["DDP"], "FSDP2": by_fsdp}, steps, per_step, flops_each=gpt_flops(size)
        )


def cnn(tiny: bool) -> None:
    """ResNet-50, bf16, channels last, images of 224 x 224."""
    depths, width, side, batch_size = ((1, 1), 8, 32, 4) if tiny else ((3, 4, 6, 3), 64, 224, 128)
    steps = 2 if tiny else 16
    images = torch.randn(steps * batch_size, 3, side, side, device=DEVICE)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (len(images),), device=DEVICE)
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=KIND == "cuda")
    criterion = nn.CrossEntropyLoss()

    def model() -> nn.Module:
        net: nn.Module = resnet(tuple(depths), width)
        return net.to(DEVICE).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def train_with(net: nn.Module, optimizer: Any) -> Train:
        def loss_of(rows: Tensor) -> Tensor:
            with cast():
                found: Tensor = criterion(net(images[rows]), labels[rows])
            return found

        return loop(loss_of, len(images), batch_size, optimizer)

    def by_fit() -> Train:
        trainer = lockstep.Trainer(
            model(),
            loss=criterion,
            optimizer=sgd,
            strategy=lockstep.MirroredStrategy([DEVICE]),
            precision="bf16-mixed",
        )
        return fit(trainer, (images, labels), batch_size)

    loops = in_loops(model, sgd, train_with)
    ours = {"loop": loops["loop"], "fit": by_fit, "own loop": loops["own loop"]}
    measure_each(ours, steps, batch_size)
    with one_process():
        measure_each({"DDP": loops["DDP"]}, steps, batch_size)


def mlp(tiny: bool) -> None:
    """784-512-512-10, float32, batch 512: so short a step that the host's work is what is timed."""
    batch_size, steps = 512, 2 if tiny else 200
    inputs = torch.randn(steps * batch_size, 784, device=DEVICE)
    labels = torch.randint(10, (len(inputs),), device=DEVICE)
    adam = partial(torch.optim.Adam, lr=1e-3, fused=True)
    criterion = nn.CrossEntropyLoss()

    def model() -> nn.Module:
        layers = (nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        return nn.Sequential(*layers, nn.Linear(512, 10)).to(DEVICE)

    def train_with(net: nn.Module, optimizer: Any) -> Train:
        def loss_of(rows: Tensor) -> Tensor:
            found: Tensor = criterion(net(inputs[rows]), labels[rows])
            return found

        return loop(loss_of, len(inputs), batch_size, optimizer)

    def by_fit(**options: Any) -> Train:
        trainer = lockstep.Trainer(
            model(),
            loss=criterion,
            optimizer=adam,
            strategy=lockstep.SingleDeviceStrategy(DEVICE),
            **options,
        )
        return fit(trainer, (inputs, labels), batch_size)

    loops = in_loops(model, adam, train_with)
    ours: dict[str, Contender] = {
        "loop": loops["loop"],
        "fit": by_fit,
        "fit, unchecked": partial(by_fit, on_nonfinite="ignore"),
        "own loop": loops["own loop"],
    }
    measure_each(ours, steps, batch_size)
    with one_process():
        measure_each({"DDP": loops["DDP"]}, steps, batch_size)


def keras(tiny: bool) -> None:
    """A Keras CNN on images of 32 x 32, float32, batch 256; plain Keras, and under a strategy."""
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import numpy as np

    batch_size, steps = (8, 2) if tiny else (256, 30)
    shape = (steps * batch_size, 32, 32, 3)
    images = np.random.default_rng(0).normal(size=shape).astype("float32")
    labels = np.arange(len(images)) % 10

    def train_with(net: Any) -> Train:
        def train(clock: Any) -> None:
            told = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: clock.end_epoch())
            options = {"epochs": clock.epochs, "verbose": 0, "callbacks": [told]}
            net.fit(images, labels, batch_size=batch_size, **options)

        return train

    def compiled() -> Any:
        layers = [keras.layers.Input((32, 32, 3))]
        for filters in (64, 128, 256):
            layers += [
                keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.MaxPooling2D(),
            ]
        net = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile("adam", loss, jit_compile=False)
        return net

    def under_a_strategy() -> Train:
        with lockstep.SingleDeviceStrategy(DEVICE).scope():
            return train_with(compiled())

    measure_each(
        {"Keras": lambda: train_with(compiled()), "fit": under_a_strategy}, steps, batch_size
    )


def ranks(tiny: bool) -> None:
    """Several ranks on one device, which exchange by way of host memory; a wide MLP, float32."""
    width, batch_size, steps = (64, 8, 2) if tiny else (4096, 1024, 8)
    inputs = torch.randn(steps * batch_size, 784)
    labels = torch.randint(10, (len(inputs),))

    def train_with(strategy: Any) -> Train:
        layers = (nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        trainer = lockstep.Trainer(
            nn.Sequential(*layers, nn.Linear(width, 10)),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-3),
            strategy=strategy,
        )
        return fit(trainer, (inputs, labels), batch_size)

    def mirrored(count: int) -> Train:
        return train_with(lockstep.MirroredStrategy([DEVICE] * count, engine="gloo"))

    contenders: dict[str, Contender] = {
        **{
            "1 rank" if count == 1 else f"{count} ranks": partial(mirrored, count)
            for count in (1, 2, 4)
        },
        "2 ranks, local SGD": lambda: train_with(
            lockstep.LocalSGDStrategy(4, [DEVICE] * 2, engine="gloo")
        ),
    }
    measure_each(contenders, steps, batch_size)


PARTS: dict[str, Callable[[bool], None]] = {
    "gpt": gpt,
    "cnn": cnn,
    "mlp": mlp,
    "keras": keras,
    "ranks": ranks,
}
