"""Jobs that several hosts and one device must train alike: a script, run on every host.

Each job uses some of the Trainer's options. It is trained on all hosts, and by host 0 also on one
device. Told is how far apart they are, and by every host a digest of what it has come to: weights,
optimizer, averages, history, outputs. Classes here are those of ``__main__``.

Arguments: Gbit/s of the network, a folder that the hosts share, names of jobs.
"""

import copy
import hashlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import lockstep
from lockstep.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lockstep.comm.codec.message_codec import encode
from lockstep.data.trees import map_tensors, tensors_of
from lockstep.train.optim.optimizers import each_optimizer
from tests.launching import be_strict
from tests.loss_zoo import JOBS as LOSS_JOBS
from tests.parity.test_custom_steps import NOISE, OPTIMIZERS, REAL, STEPS, Gan
from tests.zoo import build_seeded, normal

BATCH = 13
NUM_SAMPLES = 3 * BATCH + 1  # the last batch is one sample: a whole host has none
TIMEOUT_SECONDS = 180.0


class Net(nn.Module):
    """Large enough in the middle for activations to go in place of gradients."""

    def __init__(self, *, normalised: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 160)
        self.norm: Any = nn.BatchNorm1d(16) if normalised else nn.Tanh()
        self.middle = nn.Linear(160, 160)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(160, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        # Ten values of each channel per sample: a batch may be one sample.
        hidden = self.norm(self.first(x).unflatten(1, (16, 10))).flatten(1)
        out: Tensor = self.last(torch.tanh(self.drop(self.middle(hidden) * self.scale)))
        return out


@dataclass
class Answer:
    """What a model of ``__main__`` returns."""

    logits: Tensor
    size: int


class Answering(Net):
    def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
        return Answer(logits=super().forward(x), size=3)


class OwnSGD(torch.optim.SGD):
    """Of a class that nobody knows, which also looks at all gradients together."""

    def step(self, closure: Any = None) -> Any:
        parameters = [each for group in self.param_groups for each in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.05)
        return super().step(closure)


GENERATOR = torch.Generator().manual_seed(31)
X = normal(GENERATOR, NUM_SAMPLES, 6)
Y = (X[:, :3] + 0.3 * normal(GENERATOR, NUM_SAMPLES, 3)).argmax(1)
WEIGHTS = torch.arange(NUM_SAMPLES, dtype=torch.float64) % 3
HELD_OUT = X[:17] + 0.1, Y[:17]

Maker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SGD: Maker = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM: Maker = partial(torch.optim.Adam, lr=3e-3)


@dataclass(kw_only=True)
class Job:
    """How to train.

    Attributes:
        model: makes it.
        optimizer: makes it.
        options: of the Trainer.
        data: makes it; a function, since streams can be read only once.
        fit: options of ``fit``.
        num_shares: of the strategy on several hosts.
        reference: options of the Trainer on one device that are others there.
        tolerance: what the hosts may be away from one device.
        callbacks: makes them; they are given the shared folder.
    """

    model: Callable[[], nn.Module] = Net
    optimizer: Any = SGD
    options: dict[str, Any]
    data: Callable[[], Any] = lambda: (X, Y)
    fit: dict[str, Any]
    num_shares: int | None = None
    reference: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-12
    callbacks: Callable[[Path], Sequence[lockstep.Callback]] = lambda folder: []
    seed_of_model: int | None = None


def job(**options: Any) -> Job:
    own = {name for name in Job.__dataclass_fields__ if name not in ("options", "fit")}
    trainer = {name: value for name, value in options.items() if name not in {*own, "fit"}}
    fit = {"batch_size": BATCH, "epochs": 2, **options.get("fit", {})}
    rest = {name: value for name, value in options.items() if name in own}
    return Job(options={"precision": "fp64", **trainer}, fit=fit, **rest)


# --- data ----------------------------------------------------------------------------------------


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, NUM_SAMPLES, BATCH):
        yield X[start : start + BATCH], Y[start : start + BATCH]


def endless() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches()


def of_host_0() -> Iterator[tuple[Tensor, Tensor]]:
    """Other hosts would have other data."""
    for inputs, targets in batches():
        yield inputs + (1.0 if HOST and not IS_ALONE else 0.0), targets


class ByIndex(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


# --- callbacks -----------------------------------------------------------------------------------


class Change(lockstep.Callback):
    model: Net


class ChangeRate(Change):
    """Sets options of the optimizer, in the midst of epochs and between them."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.optimizer.param_groups[0]["lr"] *= 0.9

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.optimizer.param_groups[0]["momentum"] = 0.5


class Freeze(Change):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.first.weight.requires_grad_(epoch > 0)


class ClipWeights(Change):
    """Writes to the weights after every step, as Wasserstein GANs do."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.3, 0.3)


class HalveWeights(Change):
    """Writes to the weights between epochs."""

    @torch.no_grad()
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.last.weight.mul_(0.5)


class ChangeBuffers(Change):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.norm.running_mean.add_(0.25)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.norm.running_var.mul_(1.5)


class ChangeAttribute(Change):
    """Sets an attribute of a module between epochs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.drop.p = 0.5
        self.model.scale *= 0.5


class ChangeSlots(Change):
    """Changes the optimizer's state between epochs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for slots in self.trainer.optimizer.state.values():
            slots["momentum_buffer"] = slots["momentum_buffer"] * 0.5


class AddGroup(Change):
    """Thaws a layer that the optimizer did not have, with a rate of its own."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.model.last.bias.requires_grad:
            self.model.last.bias.requires_grad_(True)
            group = {"params": [self.model.last.bias], "lr": 0.01}
            self.trainer.optimizer.add_param_group(group)


class AtTheEnd(Change):
    @torch.no_grad()
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.first.weight.mul_(0.9)

    @torch.no_grad()
    def on_train_end(self, logs: Any = None) -> None:
        self.model.last.bias.fill_(1.0)


class Counts(lockstep.Callback):
    """Evaluates in the midst of training, and stops it."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["extra"] = self.trainer.evaluate(HELD_OUT)["loss"]
        self.trainer.stop_training = epoch == 1


def half_frozen() -> Net:
    net = Net()
    net.last.bias.requires_grad_(False)
    return net


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 160, bias=False), nn.Tanh(), nn.Linear(160, 3, bias=False))


def groups_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[:-1], lr=0.1, momentum=0.9)


# --- losses --------------------------------------------------------------------------------------


def token_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Weighs each sample by its class: 0, 1 or 2."""
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (losses * targets).sum(), targets.sum()


def squared(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, targets, reduction="none")


def by_keyword() -> Any:
    return {"x": X}, Y


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)


LOSSES = {"loss": nn.CrossEntropyLoss()}
ACCURACY = {
    "metrics": {
        "accuracy": MulticlassAccuracy(num_classes=3),
        "auroc": MulticlassAUROC(num_classes=3),
    }
}
NORMED = partial(Net, normalised=True)

JOBS: dict[str, Callable[[], Job]] = {
    "plain": lambda: job(),
    "adam": lambda: job(optimizer=ADAM),
    "clip_norm": lambda: job(clip_norm=0.05),
    "clip_value": lambda: job(clip_value=0.002),
    "accumulate": lambda: job(accumulate=3),
    "accumulate with BatchNorm": lambda: job(accumulate=2, model=NORMED),
    "averages": lambda: job(average=lockstep.EMA(0.9)),
    "averages of adam": lambda: job(average=lockstep.EMA(0.9), optimizer=ADAM),
    "schedule by step": lambda: job(schedule=partial(OneCycleLR, max_lr=0.1, total_steps=20)),
    "schedule by epoch": lambda: job(schedule=partial(StepLR, step_size=1, gamma=0.5)),
    "schedule by loss": lambda: job(
        schedule=lockstep.Schedule(plateau), fit={"epochs": 4, "validation_data": HELD_OUT}
    ),
    "bf16": lambda: job(precision="bf16", tolerance=0.05),
    "bf16-mixed": lambda: job(precision="bf16-mixed", tolerance=0.05),
    "fp16-mixed": lambda: job(precision="fp16-mixed", tolerance=0.05),
    "fp32": lambda: job(precision="fp32", tolerance=1e-5),
    "muon": lambda: job(
        optimizer=partial(torch.optim.Muon, lr=0.01), model=without_bias, tolerance=0.02
    ),
    "adafactor": lambda: job(optimizer=partial(torch.optim.Adafactor, lr=0.01)),
    "own optimizer": lambda: job(optimizer=partial(OwnSGD, lr=0.1, momentum=0.9)),
    "two optimizers": lambda: job(
        model=Gan, optimizer=OPTIMIZERS, train_step=STEPS, data=lambda: (NOISE, REAL)
    ),
    "sample weights": lambda: job(data=lambda: (X, Y, WEIGHTS)),
    "token weights": lambda: job(loss=token_loss),
    "metrics": lambda: job(fit={"validation_data": HELD_OUT}, **ACCURACY),
    "shares": lambda: job(num_shares=5),
    "shares with dropout": lambda: job(
        num_shares=4, reference={"accumulate": 4}, model=partial(Net, dropout=0.3)
    ),
    "shares with BatchNorm": lambda: job(num_shares=5, model=NORMED),
    "BatchNorm": lambda: job(model=NORMED, fit={"validation_data": HELD_OUT}),
    "loader": lambda: job(data=lambda: loader(), fit={"batch_size": None}),
    "generator": lambda: job(data=lambda: of_host_0, fit={"batch_size": None}),
    "generator and BatchNorm": lambda: job(
        data=lambda: batches, fit={"batch_size": None}, model=NORMED
    ),
    "iterator": lambda: job(
        data=endless, fit={"batch_size": None, "steps_per_epoch": 5, "epochs": 2}
    ),
    "validation stream": lambda: job(fit={"validation_data": batches}),
    "dataset": lambda: job(data=ByIndex),
    "dict of inputs": lambda: job(data=by_keyword),
    "own class of outputs": lambda: job(model=Answering, loss=squared),
    "steps per epoch": lambda: job(fit={"steps_per_epoch": 3}),
    "rate rule": lambda: job(fit={"learning_rate_rule": "linear"}),
    "skip": lambda: job(on_nonfinite="skip", data=lambda: (with_nan(), Y), fit={"shuffle": False}),
    "change of rate": lambda: job(callbacks=lambda folder: [ChangeRate()]),
    "freeze": lambda: job(callbacks=lambda folder: [Freeze()], fit={"epochs": 3}),
    "clip weights": lambda: job(callbacks=lambda folder: [ClipWeights()]),
    "halve weights": lambda: job(callbacks=lambda folder: [HalveWeights()]),
    "change buffers": lambda: job(callbacks=lambda folder: [ChangeBuffers()], model=NORMED),
    "change slots": lambda: job(callbacks=lambda folder: [ChangeSlots()]),
    "change attribute": lambda: job(
        callbacks=lambda folder: [ChangeAttribute()], num_shares=4, reference={"accumulate": 4}
    ),
    "add group": lambda: job(
        callbacks=lambda folder: [AddGroup()],
        model=half_frozen,
        optimizer=groups_of,
        fit={"epochs": 3},
    ),
    "at the end": lambda: job(callbacks=lambda folder: [AtTheEnd()]),
    "evaluate within": lambda: job(callbacks=lambda folder: [Counts()], fit={"epochs": 3}),
    "early stopping": lambda: job(
        callbacks=lambda folder: [EarlyStopping(patience=1, restore_best_weights=True)],
        optimizer=partial(torch.optim.SGD, lr=1.5),
        fit={"epochs": 6, "validation_data": HELD_OUT},
        tolerance=1e-9,  # such rates blow rounding up
    ),
    "checkpoints": lambda: job(
        callbacks=lambda folder: [ModelCheckpoint(folder / f"{HOST}-{{epoch}}.safetensors")]
    ),
    "lambda": lambda: job(
        callbacks=lambda folder: [LambdaCallback(on_epoch_end=lambda epoch, logs: None)]
    ),
    "another seed": lambda: job(seed_of_model=1),
}


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=BATCH)


def with_nan() -> Tensor:
    """Not a number in the last samples of the second batch: they are host 1's."""
    data = X.clone()
    data[2 * BATCH - 1, 2] = math.nan
    return data


# --- training and telling ------------------------------------------------------------------------


def story(one: Job, strategy: lockstep.Strategy, folder: Path) -> dict[str, Any]:
    """All that comes of a job: trees of values by name."""
    if one.seed_of_model is not None and HOST == 1 and strategy.reach == "all hosts":
        model = build_seeded(lambda: (torch.manual_seed(77), one.model())[1])
    else:
        model = build_seeded(one.model)
    options = {**LOSSES, **one.options, "callbacks": one.callbacks(folder)}
    if "train_step" in options:
        del options["loss"]
    trainer = lockstep.Trainer(
        model, optimizer=one.optimizer, strategy=strategy, **copy.deepcopy(options)
    )
    fit = {"verbose": 0, **one.fit}
    told: dict[str, Any] = {}
    for number in ("first", "second"):
        data = one.data()
        told[f"{number} history"] = trainer.fit(data, **fit).history
        told[f"{number} weights"] = weights(trainer)
        told[f"{number} optimizer"] = slots(trainer)
    if "train_step" not in options:
        told |= outputs(trainer)
    if "average" in options:
        with trainer.averaged():
            told["averages"] = weights(trainer)
            told["averaged logs"] = trainer.evaluate(HELD_OUT, batch_size=BATCH)
        told["weights after averages"] = weights(trainer)
    if "metrics" in options:
        told["metrics"] = sorted(trainer.metrics.by_name)
    trainer.close()
    return told


def outputs(trainer: lockstep.Trainer) -> dict[str, Any]:
    inputs, targets = HELD_OUT
    return {
        "logs": trainer.evaluate((inputs, targets), batch_size=BATCH),
        "outputs": plain(trainer.predict(inputs, batch_size=BATCH)),
        "no outputs": plain(trainer.predict(inputs[:0])),
        "outputs of a stream": plain(trainer.predict(lambda: iter([inputs[:7], inputs[7:8]]))),
    }


def plain(outputs: Any) -> Any:
    return outputs.logits if isinstance(outputs, Answer) else outputs


def weights(trainer: lockstep.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def slots(trainer: lockstep.Trainer) -> Any:
    return [in_order(copy.deepcopy(one.state_dict())) for one in each_optimizer(trainer.optimizer)]


def in_order(tree: Any) -> Any:
    """Slots are made in whatever order."""
    if isinstance(tree, dict):
        return {key: in_order(tree[key]) for key in sorted(tree, key=str)}
    return tree


def difference(ours: Any, theirs: Any) -> float:
    """The largest, relative to the norm of all of the same part; infinite where trees differ."""
    if isinstance(theirs, Tensor):
        theirs, ours = {"": theirs}, {"": ours}
    left, right = list(tensors_of(ours)), list(tensors_of(theirs))
    if len(left) != len(right) or any(
        one.shape != other.shape for one, other in zip(left, right, strict=True)
    ):
        return math.inf
    scale = max((float(each.double().norm()) for each in right if each.numel()), default=0.0)
    gaps = [float((a.double() - b.double()).norm()) for a, b in zip(left, right, strict=True)]
    numbers = _gap(rest_of(ours), rest_of(theirs))
    return max([gap / scale if scale else gap for gap in gaps] + [numbers])


def rest_of(tree: Any) -> Any:
    """A tree with nothing in the places of its tensors."""
    return map_tensors(lambda tensor: 0.0, tree)


def _gap(ours: Any, theirs: Any) -> float:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return math.inf
        return max((_gap(ours[key], theirs[key]) for key in ours), default=0.0)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return math.inf
        return max((_gap(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0)
    if isinstance(ours, float) and isinstance(theirs, float):
        if math.isnan(ours) and math.isnan(theirs):
            return 0.0
        return abs(ours - theirs) / max(abs(theirs), 1e-300) if ours != theirs else 0.0
    return 0.0 if ours == theirs else math.inf


def digest(tree: Any) -> str:
    return hashlib.blake2b(encode(tree), digest_size=8).hexdigest()


def run(one: Job, gbit_per_second: float, folder: Path) -> dict[str, Any]:
    global IS_ALONE
    IS_ALONE = False
    several = lockstep.MultiWorkerMirroredStrategy(
        num_shares=one.num_shares,
        network_gbit_per_second=gbit_per_second,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    ours = story(one, several, folder)
    told: dict[str, Any] = {"digests": {part: digest(value) for part, value in ours.items()}}
    if HOST > 0:
        return told
    IS_ALONE = True
    alone = replace(one, options=one.options | one.reference)
    theirs = story(alone, lockstep.SingleDeviceStrategy(), folder)
    differences = {part: difference(ours.get(part), theirs[part]) for part in theirs}
    return {**told, "tolerance": one.tolerance, "differences": differences}


def prove(name: str, gbit_per_second: float) -> dict[str, Any]:
    """One of the jobs with losses of their own, against a plain loop."""
    strategy = lockstep.MultiWorkerMirroredStrategy(
        network_gbit_per_second=gbit_per_second, timeout_seconds=TIMEOUT_SECONDS
    )
    report = str(lockstep.verify(LOSS_JOBS[name](), strategy))
    passed = "Passed" in report
    return {"tolerance": 0.0, "differences": {report: float(not passed)}, "digests": {"": report}}


def main() -> None:
    global HOST
    HOST = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    network, folder, *names = sys.argv[1:]
    for name in names or [*JOBS, *LOSS_JOBS]:
        told: dict[str, Any] = {"job": name}
        try:
            if name in JOBS:
                told |= run(JOBS[name](), float(network), Path(folder))
            else:
                told |= prove(name, float(network))
        except Exception:
            told["error"] = traceback.format_exc()
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


HOST = 0
IS_ALONE = False

if __name__ == "__main__":
    be_strict()
    main()
