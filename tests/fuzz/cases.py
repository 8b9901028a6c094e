"""Random trainings: what is trained, on what, how, and where. A case is a function of its seed."""

import random
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from tests.fuzz.blocks import BATCH_NORMS, BLOCKS, RANDOM
from tests.fuzz.losses import LOSSES
from tests.fuzz.nets import HIDDEN, Shape
from tests.fuzz.showing import Repr

# What a model may compute itself as a loss, and what a training step of the user's own.
OWN_LOSSES = (
    "cross entropy",
    "cross entropy, ignoring",
    "cross entropy, weighted",
    "squares",
    "squares by sample",
    "tokens",
    "tokens, total",
    "tokens, by hand",
)
FORMS = ("tensors", "numpy", "dataset", "loader", "function", "batches", "iterator")
STREAMS = ("loader", "function", "batches", "iterator")


@dataclass(frozen=True, kw_only=True, repr=False)
class Case(Repr):
    """A training.

    Attributes:
        shape: of the model.
        loss: its name; of two heads, of the first: the other one's is "squares".
        own: "" for a loss function, "model" for a loss that the model computes, "step" for a
            training step.
        optimizer: its name.
        groups: weights and biases have parameter groups of their own.
        is_made: the Trainer gets an optimizer, and not what makes one.
        form: of the data.
        keyed: inputs are keyword arguments.
        count: samples.
        batch_size: of an update.
        weighted: samples have weights.
        shuffle: take samples in an order of the Trainer's own.
        options: of the Trainer.
        schedule: of the learning rate.
        actions: what is done, one after the other.
        strategy: its class.
        layout: its arguments.
        other: strategy and arguments after the action "elsewhere".
        seed: of weights and data.
    """

    shape: Shape = field(default_factory=Shape)
    loss: str = "squares"
    own: str = ""
    optimizer: str = "sgd"
    groups: bool = False
    is_made: bool = False
    form: str = "tensors"
    keyed: bool = False
    count: int = 16
    batch_size: int = 8
    weighted: bool = False
    shuffle: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    schedule: str = ""
    actions: tuple[str, ...] = ("fit",)
    strategy: str = "SingleDeviceStrategy"
    layout: dict[str, Any] = field(default_factory=dict)
    other: tuple[str, dict[str, Any]] = ("SingleDeviceStrategy", {})
    seed: int = 0

    @property
    def has_batch_norm(self) -> bool:
        return bool(BATCH_NORMS & {*self.shape.body, *self.shape.tail})


# --- optimizers ----------------------------------------------------------------------------------

SGD = partial(optim.SGD, lr=0.05)

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": SGD,
    "sgd with momentum": partial(SGD, momentum=0.9, dampening=0.1),
    "sgd, nesterov": partial(SGD, momentum=0.8, nesterov=True, weight_decay=0.01),
    "sgd, maximizing": partial(optim.SGD, lr=0.001, maximize=True),
    "adam": partial(optim.Adam, lr=0.01),
    "adam, decayed": partial(optim.Adam, lr=0.01, weight_decay=0.1, eps=1e-4),
    "adamw, amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "adamax": partial(optim.Adamax, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "rmsprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.5, eps=1e-3),
    "adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "asgd": partial(optim.ASGD, lr=0.05, t0=1),
    "rprop": partial(optim.Rprop, lr=0.001),
    "adafactor": partial(optim.Adafactor, lr=0.01),
    "muon": partial(optim.Muon, lr=0.01),
}


class Decayed(optim.Optimizer):
    """An optimizer of the user's own, of which nothing is known."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    mean = self.state[one].setdefault("mean", torch.zeros_like(one))
                    mean.mul_(0.5).add_(one.grad)
                    one.sub_(group["lr"] * mean / (1 + mean.norm()))


OPTIMIZERS["of the user"] = Decayed


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], *, groups: bool) -> Any:
    own = list(parameters)
    if name == "muon":  # the others are not trained
        own = [one for one in own if one.dim() == 2 and one.numel()]
    make = OPTIMIZERS[name]
    if not groups:
        return make(own)
    small = [one for one in own if one.dim() < 2 and one.requires_grad]
    large = [one for one in own if one.dim() >= 2]
    return make([{"params": large, "lr": 0.02}, {"params": small}] if small else own)


# --- drawing -------------------------------------------------------------------------------------


def draw(seed: int) -> Case:
    """A case whose result is that of one device, to rounding."""
    case = allowed(_drawn(random.Random(seed), seed, RANDOM))
    if case.strategy == "MirroredStrategy" and seed % 4 == 3:
        case = replace(case, layout={**case.layout, "threads_per_device": 2})
    return case


def draw_divided(seed: int) -> Case:
    """A case whose layers are divided inside."""
    rng = random.Random(f"tensor {seed}")
    case = _drawn(rng, seed, RANDOM)
    layouts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("TensorParallelStrategy", {"degree": 2}),
        ("TensorParallelStrategy", {"degree": 3}),
        ("TensorParallelStrategy", {"degree": 2, "num_tensor_shards": 3}),
        ("HybridStrategy", {"data": 2, "tensor": 2}),
        ("HybridStrategy", _divided_stages(rng)),
        ("HybridStrategy", _divided_stages(rng)),
    )
    strategy, layout = rng.choice(layouts)
    return allowed(replace(case, strategy=strategy, layout=layout))


def _divided_stages(rng: random.Random) -> dict[str, Any]:
    """A pipeline whose stages have two or three processes, or replicas of two."""
    layout: dict[str, Any] = {"tensor": 2, "pipe": 2, "microbatches": rng.choice((1, 2, 3))}
    match rng.choice(("", "", "three", "data", "schedule", "recompute", "engine")):
        case "three":
            layout["tensor"] = 3
        case "data":
            layout["data"] = rng.choice((2, (2, 1), (1, 2)))
        case "schedule":
            layout["schedule"] = rng.choice(("gpipe", "interleaved", "zb-h1", "zb-h2"))
        case "recompute":
            layout["recompute"] = True
        case "engine":
            layout["engine"] = "gloo"
    return layout


def draw_random(seed: int) -> Case:
    """A case in which random numbers are drawn, for equal bits under two layouts."""
    rng = random.Random(f"bits {seed}")  # other cases than those of ``draw``
    case = _drawn(rng, seed, set())
    shares = rng.choice((2, 3, 4, 5))
    strategy, layout = rng.choice(
        (
            ("MirroredStrategy", {"devices": 2, "num_shares": shares}),
            ("MirroredStrategy", {"devices": 2, "num_shares": shares, "engine": "gloo"}),
            ("MirroredStrategy", {"devices": 3, "num_shares": shares + 1}),
            ("ParameterServerStrategy", {"servers": 1, "workers": 2}),
        )
    )
    actions = tuple(one for one in case.actions if one != "elsewhere")
    if strategy == "ParameterServerStrategy":  # keeps gradients sparse, where others do not
        case = replace(case, shape=_dense(case.shape))
    return allowed(replace(case, strategy=strategy, layout=layout, actions=actions))


def _dense(shape: Shape) -> Shape:
    entry, second = (
        "tokens" if kind == "tokens, sparse" else kind for kind in (shape.entry, shape.second)
    )
    return replace(shape, entry=entry, second=second)


def _drawn(rng: random.Random, seed: int, without: set[str]) -> Case:
    shape = draw_shape(rng, without)
    own = rng.choice(("", "", "", "", "", "model", "step")) if shape.heads == 1 else ""
    names = [
        name
        for name, loss in LOSSES.items()
        if (loss.target == "tokens") == shape.per_token and (not own or name in OWN_LOSSES)
    ]
    loss = rng.choice(names)
    batch_size = rng.choice((4, 6, 7, 9, 12))
    strategy, layout = _draw_strategy(rng)
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        options["accumulate"] = rng.choice((2, 3))
    if rng.random() < 0.2:
        options["clip_norm"] = rng.choice((0.01, 0.5))
    elif rng.random() < 0.15:
        options["clip_value"] = rng.choice((0.001, 0.05))
    if rng.random() < 0.15:
        options["average"] = 0.6
    return Case(
        shape=shape,
        loss=loss,
        own=own,
        optimizer=rng.choice(("sgd", "sgd with momentum", *OPTIMIZERS)),
        groups=rng.random() < 0.3,
        is_made=rng.random() < 0.5,
        form=rng.choice(("tensors", "tensors", *FORMS)),
        keyed=own == "model" or rng.random() < 0.3,
        count=rng.randint(batch_size + 2, 3 * batch_size),
        batch_size=batch_size,
        weighted=not own and LOSSES[loss].values is not None and rng.random() < 0.3,
        shuffle=rng.random() < 0.4,
        options=options,
        schedule=rng.choice(("", "", "", "epoch", "step")),
        actions=_draw_actions(rng),
        strategy=strategy,
        layout=layout,
        other=_draw_strategy(rng),
        seed=seed,
    )


def draw_shape(rng: random.Random, without: set[str]) -> Shape:
    entry = rng.choice(list(HIDDEN))
    kind = HIDDEN[entry]
    per_token = kind == "sequence" and rng.random() < 0.5

    def blocks(of: str, most: int) -> tuple[str, ...]:
        names = [name for name in BLOCKS[of] if name not in without]
        return tuple(rng.choice(names) for _ in range(rng.randint(0, most)))

    body = blocks(kind, 3)
    skips = tuple(
        (start, stop)
        for start in range(len(body))
        for stop in range(start + 1, len(body))
        if rng.random() < 0.3
    )
    return Shape(
        entry=entry,
        body=body,
        tail=() if per_token else blocks("vector", 3),
        second="" if per_token or rng.random() < 0.7 else rng.choice(list(HIDDEN)),
        skips=skips,
        ties=rng.random() < 0.3,
        twice=not per_token and rng.random() < 0.15,
        unused=rng.random() < 0.2,
        heads=2 if not per_token and rng.random() < 0.2 else 1,
        per_token=per_token,
    )


def _draw_strategy(rng: random.Random) -> tuple[str, dict[str, Any]]:
    kinds = ("single", "mirrored", "mirrored", "gloo", "shard", "pipe", "pipe", "hybrid", "serve")
    match rng.choice(kinds):
        case "single":
            return "SingleDeviceStrategy", {}
        case "mirrored":
            shares = rng.choice((None, None, 3, 5))
            count = rng.choice((1, 2, 2, 2, 3))
            return "MirroredStrategy", {"devices": count} | (
                {"num_shares": shares} if shares else {}
            )
        case "gloo":
            return "MirroredStrategy", {"devices": 2, "engine": "gloo"}
        case "shard":
            level = rng.choice(("slots", "gradients", "parameters", "parameters"))
            layout: dict[str, Any] = {"level": level}
            count = rng.choice((2, 3, 4))
            if rng.random() < 0.3:
                layout["recompute"] = True
            if count == 4:
                return "HybridStrategy", {"data": 2, "shard": 2, **layout}
            if rng.random() < 0.2:
                layout["offload"] = tempfile.gettempdir()
            return "FullyShardedStrategy", {"devices": count, **layout}
        case "pipe":
            layout = {"stages": 2, "microbatches": rng.choice((1, 2, 3, 4))}
            layout["schedule"] = rng.choice(("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2"))
            if rng.random() < 0.2:
                layout["engine"] = "gloo"
            if rng.random() < 0.2:
                layout["recompute"] = True
            return "PipelineStrategy", layout
        case "hybrid":
            replicas = rng.choice(({"data": 2}, {"data": (2, 1)}, {"data": (1, 2)}, {"shard": 2}))
            layout = {**replicas, "pipe": 2, "microbatches": rng.choice((1, 2))}
            if "shard" in layout:
                layout |= {"level": "slots"} | rng.choice(({}, {"engine": "gloo"}))
            return "HybridStrategy", layout
        case _:
            return "ParameterServerStrategy", {"servers": 1, "workers": 2}


def _draw_actions(rng: random.Random) -> tuple[str, ...]:
    if rng.random() < 0.6:
        return ("fit",) if rng.random() < 0.6 else ("fit", rng.choice(("evaluate", "predict")))
    between = ("evaluate", "predict", "save", "freeze", "rate", "elsewhere", "fit", "validate")
    return ("fit", *(rng.choice(between) for _ in range(rng.randint(1, 3))), "fit")


def allowed(case: Case) -> Case:
    """The case, without what is documented as not to be had together."""
    is_alone = case.strategy == "SingleDeviceStrategy" or case.layout.get("devices") == 1
    other = case.other if "elsewhere" in case.actions else ("SingleDeviceStrategy", {})
    in_stages = _has_stages(case.strategy, case.layout) or _has_stages(*other)
    shape = case.shape
    if in_stages:
        if case.own == "step":
            case = replace(case, own="")
        shape = _without(shape, "checkpointed, reentrant")
    if not is_alone or "elsewhere" in case.actions:
        shape = _without(shape, "parameter hook")
    steps_parts = in_stages or "ParameterServerStrategy" in (case.strategy, other[0])
    if steps_parts and case.optimizer == "of the user":
        case = replace(case, optimizer="sgd")
    if case.loss in ("hardest", "third") and case.count % case.batch_size in (1, 2):
        case = replace(case, count=case.count + 2)  # they need three samples
    if "tokens, sparse" in (shape.entry, shape.second) and case.optimizer not in ("sgd", "adagrad"):
        case = replace(case, optimizer="sgd")
    case = replace(case, shape=shape)
    if case.optimizer == "adafactor" and "scalars" in (*shape.body, *shape.tail):
        case = replace(case, optimizer="adam")  # torch divides by the number of elements, 0
    most = case.options.get("accumulate", 1) * max(
        layout.get("microbatches", 1) * 2 for layout in (case.layout, other[1])
    )
    if in_stages and case.batch_size < most:
        case = replace(case, batch_size=most, count=2 * most + 3)
    if case.has_batch_norm:
        case = _with_batch_statistics(replace(case, other=other))
    if case.form in STREAMS:
        case = replace(case, shuffle=False)
    return case


def _has_stages(strategy: str, layout: dict[str, Any]) -> bool:
    return strategy == "PipelineStrategy" or "pipe" in layout


def _in_one_microbatch(strategy: str, layout: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if "tensor" in layout:
        return strategy, {**layout, "data": 1, "microbatches": 1}
    return "PipelineStrategy", {"stages": 2, "microbatches": 1}


def _without(shape: Shape, name: str) -> Shape:
    body, tail = (tuple(one for one in own if one != name) for own in (shape.body, shape.tail))
    return replace(shape, body=body, tail=tail, skips=() if body != shape.body else shape.skips)


def _with_batch_statistics(case: Case) -> Case:
    """Microbatches would have their own, and one sample has none."""
    options, layouts = dict(case.options), []
    for strategy, layout in ((case.strategy, case.layout), case.other):
        if _has_stages(strategy, layout):
            options.pop("accumulate", None)
            strategy, layout = _in_one_microbatch(strategy, layout)
        layouts.append((strategy, layout))
    (strategy, layout), other = layouts
    more = 1 if case.count % case.batch_size == 1 else 0
    return replace(
        case,
        strategy=strategy,
        layout=layout,
        other=other,
        options=options,
        count=case.count + more,
    )
