"""Trainings of Accelerate and Lightning, right ones and with planted faults.

``python recorded_libraries.py FOLDER NAME...``, as in ``recorded_loops``: a name is a training, or
a training and a fault, and with one process a training is the reference, without the fault.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

STEPS, BATCH = 4, 24


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data() -> TensorDataset:
    """Inputs, targets and numbers of samples."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(240, 6, generator=generator), torch.arange(240) % 3
    return TensorDataset(x, y, torch.arange(240))


# --- Accelerate -----------------------------------------------------------------------------------


def accelerate(path: Path, fault: str, *, batches: int = 1, schedule: bool = False) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=batches)
    model = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    size = BATCH // batches // accelerator.num_processes
    loader = DataLoader(data(), batch_size=size if fault != "batch of all" else BATCH // batches)
    own = model if fault == "not prepared" else accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    if fault == "loader not prepared":
        loader = DataLoader(data(), batch_size=BATCH // batches)
    else:
        loader = accelerator.prepare(loader)
    with lockstep.record(own, optimizer, path, steps=STEPS) as recorder:
        for x, y, numbers in loader:
            with accelerator.accumulate(own):
                loss = F.cross_entropy(own(x), y)
                recorder.batch(numbers)
                recorder.loss(loss, weight=len(x))
                accelerator.backward(loss / batches if fault == "divided twice" else loss)
                optimizer.step()
                if schedule and accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()


# --- Lightning ------------------------------------------------------------------------------------


def fabric(path: Path, fault: str) -> None:
    from lightning.fabric import Fabric

    size = dist.get_world_size()
    run = Fabric(accelerator="cpu", devices=size, strategy="ddp")
    run.launch()
    model = make_model()
    wrapped, optimizer = run.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    loader: Any = DataLoader(data(), batch_size=BATCH // size)
    if fault != "loader not set up":
        loader = run.setup_dataloaders(loader)
    with lockstep.record(wrapped, optimizer, path, steps=STEPS) as recorder:
        for x, y, numbers in loader:
            own = model if fault == "bypassed" else wrapped
            total = F.cross_entropy(own(x), y, reduction="sum")
            recorder.batch(numbers)
            recorder.loss(total / len(x), weight=len(x))
            run.backward(total if fault == "sum" else total / len(x))
            optimizer.step()
            optimizer.zero_grad()


def trainer(path: Path, fault: str, *, batches: int = 1, precision: str = "32-true") -> None:
    import lightning.pytorch as pl

    size = dist.get_world_size()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any) -> Tensor:
            x, y, numbers = batch
            loss = F.cross_entropy(self.net(x), y)
            recorder.batch(numbers)
            recorder.loss(loss, weight=len(x))
            return loss * size if fault == "times ranks" else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    run = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp",
        max_steps=STEPS,
        accumulate_grad_batches=batches,
        precision=precision,
        use_distributed_sampler=True,
        gradient_clip_val=0.05 if fault == "clipped" else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data(), batch_size=BATCH // size // batches)
    with lockstep.record(module, None, path, steps=STEPS) as recorder:
        run.fit(module, loader)


TRAININGS: dict[str, Callable[[Path, str], None]] = {
    "accelerate": accelerate,
    "accelerate, accumulation": partial(accelerate, batches=3),
    "accelerate, schedule": partial(accelerate, schedule=True),
    "fabric": fabric,
    "trainer": trainer,
    "trainer, accumulation": partial(trainer, batches=3),
    "trainer, bf16": partial(trainer, precision="bf16-mixed"),
}


def run_trainings(trainings: Mapping[str, Callable[[Path, str], None]]) -> None:
    """Record those that the command line names."""
    warnings.simplefilter("ignore")  # of the faults and of the libraries
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder, *names = sys.argv[1:]
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    # As torchrun has it; where they meet is a file, so that no port is needed.
    place = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0", "NODE_RANK": "0"}
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="tests")
    where = f"file://{folder}/store{size}"
    dist.init_process_group("gloo", init_method=where, rank=int(rank), world_size=int(size))
    for name in names:
        title, _, fault = name.partition(":")
        path = Path(folder) / f"of{size}"
        if size == "1":
            trainings[title](path / title, "")
        else:
            trainings[title](path / name, fault)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # see ``recorded_loops``


if __name__ == "__main__":
    run_trainings(TRAININGS)
