"""Trainings of DDP, FSDP2 and a loop without a library, right ones and with planted faults.

``python recorded_loops.py FOLDER NAME...`` records the named trainings one after another, as one of
``WORLD_SIZE`` processes. A name is a training, or a training and a fault: ``ddp:no sampler``. Every
training holds the global batch, whatever the number of processes: with one process it is the
reference, and the fault is not there. The fault "compiled" is none: it must agree.
"""

import contextlib
import copy
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lockstep

STEPS, BATCH, FEATURES, CLASSES = 4, 24, 6, 3


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how.

    Attributes:
        library: "ddp", "fsdp2" or "plain".
        model: a function that builds it.
        optimizer: one that makes it, of groups of parameters.
        batches: microbatches of a step.
        uneven: how many of a batch's samples rank 0 has, of two.
        clip: largest norm of the gradients.
        dtype: of autocast, or of FSDP2's policy.
        double: everything in float64.
        schedule: whether the learning rate falls with each step.
        copies: whether FSDP2 has copies of the parameters and no shards, as in hybrid sharding.
        decay: whether weight decay is for matrices only.
    """

    library: str = "ddp"
    model: Any = None
    optimizer: Any = None
    batches: int = 1
    uneven: int | None = None
    clip: float | None = None
    dtype: torch.dtype | None = None
    double: bool = False
    schedule: bool = False
    decay: bool = False
    copies: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# --- models -------------------------------------------------------------------------------------


class Net(nn.Module):
    """A body and a head; ``spare`` is used by every second sample, so by those of rank 0 only."""

    def __init__(self, *, spare: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(drop))
        self.head = nn.Linear(16, CLASSES)
        self.spare = nn.Linear(16, CLASSES) if spare else None

    def forward(self, x: Tensor, numbers: Tensor | None = None) -> Tensor:
        hidden = self.body(x)
        output: Tensor = self.head(hidden)
        if self.spare is not None and numbers is not None and (used := numbers % 2 == 0).any():
            output = output + used[:, None] * self.spare(hidden)
        return output


class Tied(nn.Module):
    """One matrix, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return output


class Frozen(Net):
    """A body that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)


class Attention(nn.Module):
    """The bias of attention's keys has no gradient but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(FEATURES, 32)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.block(self.inside(x).view(-1, 4, 8)).mean(1))
        return output


class GlobalBatchNorm(nn.BatchNorm1d):
    """What SyncBatchNorm does on GPUs: the statistics are those of all ranks' samples."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce

        sums = torch.stack([x.sum(0), x.pow(2).sum(0), torch.ones_like(x).sum(0)])
        total, squares, count = all_reduce(sums)
        mean = total / count
        variance = squares / count - mean.pow(2)
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance * count / (count - 1), 0.1)
        output: Tensor = (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias
        return output


def normalised(kind: type[nn.Module]) -> nn.Module:
    """A net with one batch normalisation."""
    return nn.Sequential(nn.Linear(FEATURES, 16), kind(16), nn.Tanh(), nn.Linear(16, CLASSES))


def sgd(groups: Any) -> Any:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adam(groups: Any) -> Any:
    return torch.optim.Adam(groups, lr=0.01)


def adamw(groups: Any) -> Any:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


TRAININGS = {
    "ddp": Training(model=Net, optimizer=sgd),
    "ddp, adam": Training(model=Net, optimizer=adam),
    "ddp, uneven": Training(model=Net, optimizer=sgd, uneven=15),
    "ddp, accumulation": Training(model=Net, optimizer=sgd, batches=3),
    "ddp, ties": Training(model=Tied, optimizer=adam),
    "ddp, frozen": Training(model=Frozen, optimizer=adam),
    "ddp, global batch norm": Training(model=lambda: normalised(GlobalBatchNorm), optimizer=adam),
    "ddp, batch norm": Training(model=lambda: normalised(nn.BatchNorm1d), optimizer=sgd),
    "ddp, dropout": Training(model=lambda: Net(drop=0.5), optimizer=sgd),
    "ddp, bf16": Training(model=Net, optimizer=sgd, dtype=torch.bfloat16),
    "ddp, float64": Training(model=Net, optimizer=adam, double=True),
    "ddp, clipping": Training(model=Net, optimizer=sgd, clip=0.1),
    "ddp, schedule": Training(model=Net, optimizer=sgd, schedule=True),
    "ddp, weight decay": Training(model=Net, optimizer=adamw, decay=True),
    "ddp, attention": Training(model=Attention, optimizer=adam),
    "ddp, spare": Training(
        model=lambda: Net(spare=True), optimizer=sgd, options={"find_unused_parameters": True}
    ),
    "fsdp2": Training(library="fsdp2", model=Net, optimizer=sgd),
    "fsdp2, adam": Training(library="fsdp2", model=Net, optimizer=adam, clip=0.1),
    "fsdp2, accumulation": Training(library="fsdp2", model=Net, optimizer=sgd, batches=3),
    "fsdp2, bf16": Training(library="fsdp2", model=Net, optimizer=sgd, dtype=torch.bfloat16),
    "fsdp2, copies": Training(library="fsdp2", model=Net, optimizer=adam, copies=True),
    "fsdp2, attention": Training(library="fsdp2", model=Attention, optimizer=adam),
    "plain": Training(library="plain", model=Net, optimizer=sgd),
    "plain, spare": Training(library="plain", model=lambda: Net(spare=True), optimizer=sgd),
}


# --- one training -------------------------------------------------------------------------------


@dataclass
class Loop:
    """A training in this process, with its fault."""

    training: Training
    fault: str
    rank: int
    size: int
    model: nn.Module = field(init=False)
    wrapped: nn.Module = field(init=False)
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        own_seed = self.rank if self.fault == "own seed" else 0
        torch.manual_seed(5 if self.fault == "other seed" else own_seed)
        self.model = self.training.model()
        if self.training.double:
            self.model.double()
        groups = self.groups(self.model)
        self.wrapped = self.wrap()
        if self.training.library == "fsdp2":  # which has replaced the parameters
            groups = self.groups(self.model)
        if self.fault == "groups of the wrapper":
            groups = self.groups(self.wrapped)
        self.optimizer = self.training.optimizer(groups)
        if self.fault == "compiled":
            self.wrapped = torch.compile(self.wrapped, backend="eager")  # type: ignore[assignment]
        if self.fault == "head replaced":
            self.model.head = copy.deepcopy(self.model.head)
        if self.training.library == "ddp" and self.training.model is not Frozen:
            # As users do: all ranks made the model under one seed, and go on with it, or not.
            torch.manual_seed(0 if self.fault == "drawn alike" else self.rank)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """All parameters, or matrices and others with their own weight decay."""
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        if not self.training.decay:
            return [{"params": [each for _, each in named]}]
        decaying = ("body.0.weight", "head.weight")
        return [
            {"params": [each for name, each in named if name in decaying]},
            {"params": [each for name, each in named if name not in decaying], "weight_decay": 0.0},
        ]

    def wrap(self) -> nn.Module:
        if self.training.library == "ddp":
            if self.fault == "head outside":
                self.model.body = DistributedDataParallel(self.model.body)
                return self.model
            return DistributedDataParallel(self.model, **self.training.options)
        if self.training.library == "fsdp2":
            dtype = self.training.dtype
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            sizes = (self.size, 1) if self.training.copies else (self.size,)
            names = ("copies", "shards")[-len(sizes) :]
            mesh = dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)
            options = {"mesh": mesh, "mp_policy": policy if dtype else MixedPrecisionPolicy()}
            for child in self.model.children():
                if any(True for _ in child.parameters()):
                    fully_shard(child, **options)  # type: ignore[call-overload]
            fully_shard(self.model, **options)  # type: ignore[call-overload]
        return self.model

    def run(self, recorder: Any) -> None:
        x, y = samples(self.training.double)
        schedule = None
        if self.training.schedule:
            schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        scaler = Scaler(skips=1) if self.fault == "skipped update" else None
        for step in range(STEPS):
            for index in range(self.training.batches):
                part = self.part(step, index)
                recorder.batch(part)
                with self.synchronised(index):
                    self.backward(recorder, x, y, part)
            self.reduce()
            self.clip()
            if scaler is None or scaler.takes(step):
                self.optimizer.step()
            if self.fault != "left over":
                self.optimizer.zero_grad()
            for _ in range(self.size if self.fault == "steps of all" else 1):
                if schedule is not None:
                    schedule.step()

    def part(self, step: int, index: int) -> Tensor:
        """The numbers of the samples of this rank's batch."""
        size = BATCH // self.training.batches
        batch = torch.arange(size) + step * BATCH + index * size
        if self.fault == "no sampler":
            return batch
        if self.fault == "batch of each":
            return torch.arange(BATCH) + (step * self.size + self.rank) * BATCH
        if self.fault == "other order":
            batch = (batch + 7 * BATCH // 3) % 240
        if self.fault == "last left out":
            batch = batch[: size - 2]
        if self.fault == "padded":
            batch = torch.cat([batch, batch[:2]])
        if self.training.uneven is not None and self.size > 1:
            return (
                batch[: self.training.uneven] if self.rank == 0 else batch[self.training.uneven :]
            )
        return batch[self.rank :: self.size]

    def backward(self, recorder: Any, x: Tensor, y: Tensor, part: Tensor) -> None:
        model = self.model if self.fault == "bypassed" else self.wrapped
        dtype = self.training.dtype if self.training.library != "fsdp2" else None
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            output = model(x[part], part) if isinstance(self.model, Net) else model(x[part])
        x, y = x[part], y[part]
        if self.fault == "sum":
            loss = F.cross_entropy(output.to(x.dtype), y, reduction="sum")
            recorder.loss(loss / len(x), weight=len(x))
        else:
            loss = F.cross_entropy(output.to(x.dtype), y)
            recorder.loss(loss, weight=len(x))
        (loss * self.factor(len(x))).backward()

    def factor(self, count: int) -> float:
        """What a share's mean counts for in the mean over ranks and microbatches."""
        batches = self.training.batches
        if self.fault == "not divided":
            return 1.0
        if self.fault == "sums":
            return float(self.size)
        if self.fault == "divided twice":
            return 1 / batches**2
        if self.fault == "mean of means" or self.training.uneven is None:
            return 1 / batches
        return count * self.size / BATCH

    @contextlib.contextmanager
    def synchronised(self, index: int) -> Iterator[None]:
        """Gradients are summed in a step's last backward pass only."""
        is_last = index == self.training.batches - 1 and self.fault != "never summed"
        if self.training.library == "fsdp2":
            self.wrapped.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        if self.training.library == "ddp" and not is_last:
            with self.wrapped.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def reduce(self) -> None:
        if self.training.library != "plain":
            return
        for name, each in self.model.named_parameters():
            if self.fault == "one left out" and name == "head.weight":
                continue
            if each.grad is None and self.fault != "none left out":
                each.grad = torch.zeros_like(each)
            total = torch.zeros_like(each) if each.grad is None else each.grad
            dist.all_reduce(total)
            if self.fault != "sums":
                total /= self.size

    def clip(self) -> None:
        if self.training.clip is None or self.fault == "not clipped":
            return
        parameters = list(self.model.parameters())
        if self.fault == "clipped per rank":
            local = [each.grad.to_local() for each in parameters if each.grad is not None]  # type: ignore[attr-defined]
            norm = torch.stack([each.norm() for each in local]).norm()
            for each in local:
                each.mul_(self.training.clip / norm)
            return
        nn.utils.clip_grad_norm_(parameters, self.training.clip)


class Scaler:
    """As a loss scaler does: one update is left out, where gradients have overflown."""

    def __init__(self, skips: int) -> None:
        self.skips = skips

    def takes(self, step: int) -> bool:
        return step != self.skips


def samples(double: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(240, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (240,), generator=generator)
    return (x.double() if double else x), y


def disturb(loop: Loop) -> None:
    """One rank's parameters change behind its second update."""
    updates: list[None] = []

    def change(*_: Any) -> None:
        updates.append(None)
        if len(updates) == 2 and loop.rank == 1:
            with torch.no_grad():
                next(loop.model.parameters()).add_(0.01)

    loop.optimizer.register_step_post_hook(change)


def record(folder: Path, name: str) -> None:
    """Record a training of all processes."""
    title, _, fault = name.partition(":")
    rank, size = dist.get_rank(), dist.get_world_size()
    loop = Loop(TRAININGS[title], fault if size > 1 else "", rank, size)
    if loop.fault == "rank changed":
        disturb(loop)
    path = folder / (name if size > 1 else title)
    model = loop.wrapped
    with lockstep.record(model, loop.optimizer, path, steps=STEPS, tensors="digest") as recorder:
        loop.run(recorder)


def main() -> None:
    warnings.simplefilter("ignore")  # of the faults
    torch.set_num_threads(1)
    folder, *names = sys.argv[1:]
    size = os.environ["WORLD_SIZE"]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{size}",
        rank=int(os.environ["RANK"]),
        world_size=int(size),
    )
    for name in names:
        record(Path(folder) / f"of{size}", name)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 aborts one in 25 processes at their end, over gloo


if __name__ == "__main__":
    main()
