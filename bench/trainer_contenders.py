"""Contenders that train PyTorch models through another library: Accelerate and Lightning.

Run through ``bench/contenders.py``.
"""

import logging
import os
import warnings
from itertools import count
from typing import Any

import torch
from measuring import Stopwatch, batches, loop
from nets import Net
from torch_contenders import DDP_SETTINGS, FUSED_ADAM, NUM_RANKS


def announce_rank(rank: int) -> None:
    """Tell a library in the launchers' way that this process is one rank of several."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(NUM_RANKS),
        LOCAL_WORLD_SIZE=str(NUM_RANKS),
        OMP_NUM_THREADS="1",
    )


def train_accelerate(net: Net, rank: int, seconds: float) -> dict[str, float]:
    announce_rank(rank)
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**DDP_SETTINGS)]
    )
    if accelerator.num_processes != NUM_RANKS:
        raise RuntimeError(f"Accelerate sees {accelerator.num_processes} processes")
    model = net.make_model()
    model, optimizer = accelerator.prepare(model, FUSED_ADAM(model.parameters()))

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = net.loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    return loop(net, step, batches(net, rank, NUM_RANKS), seconds)


def train_lightning(net: Net, rank: int, seconds: float) -> dict[str, float]:
    announce_rank(rank)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    watch = Stopwatch(seconds, net.batch_size)
    batch = batches(net, rank, NUM_RANKS)

    class Module(lightning.LightningModule):  # type: ignore[misc]  # not installed for mypy
        def __init__(self) -> None:
            super().__init__()
            self.model = net.make_model()
            self.loss = float("nan")

        def training_step(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            inputs, targets = pair
            loss = net.loss(self.model(inputs), targets)
            self.loss = loss.item()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if watch.step_done():
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return FUSED_ADAM(self.parameters())

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=DDPStrategy(process_group_backend="gloo", **DDP_SETTINGS),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, (batch(number) for number in count()))
    return watch.figures(module.loss)
