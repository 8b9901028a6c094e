"""A loop of one's own, as every replica runs it: its arguments are the engine and the loops to run.

The engine may be followed by a kind of accelerator ("gloo@cuda"), on which the replicas then train.
A loop with ", compiled" behind its name calls what torch.compile makes of the model.

Each loop trains with ``CrossReplicaOptimizer`` on this replica's parts, then the first replica does
the same with a plain optimizer on whole batches. It tells by how much each tensor differs.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from tests.zoo import TokenLoss, build_seeded, case

COMPILED = ", compiled"

# The last two leave replicas without samples.
SIZES = (10, 7, 10, 2, 1)
Batches = list[tuple[Tensor, Tensor]]


class Words(nn.Module):
    """Few rows of the embedding have a gradient, which is sparse where replicas train."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, sparse=sparse)
        self.head = nn.Linear(8, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.frozen(self.head(self.embedding(words).mean(1)))
        return logits


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """A mean, and what it is a mean over."""
    return F.cross_entropy(model(inputs), targets), float(len(inputs))


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    total, weight = TokenLoss()(model(inputs), targets)
    return total / weight, float(weight)


def of_zoo(name: str) -> tuple[Callable[[bool], nn.Module], Batches]:
    job = case(name)
    assert isinstance(job.inputs, Tensor)
    return (lambda sparse: job.make_model()), list(
        zip(job.inputs.split(SIZES[0]), job.targets.split(SIZES[0]), strict=True)
    )


def words() -> tuple[Callable[[bool], nn.Module], Batches]:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(50, (size, 3), generator=generator) for size in SIZES]
    targets = [torch.randint(5, (size,), generator=generator) for size in SIZES]
    return (lambda sparse: build_seeded(partial(Words, sparse=sparse))), [
        *zip(drawn, targets, strict=True)
    ]


def odd(batches: Batches) -> Batches:
    return [
        (inputs[:size], targets[:size])
        for (inputs, targets), size in zip(batches, SIZES, strict=False)
    ]


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=1e-2)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class OfTheUser(torch.optim.SGD):
    """Nothing is known of it, so the first replica steps it alone."""


# Model and data, loss, optimizer, and what is special.
LOOPS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "mlp": (partial(of_zoo, "mlp"), mean_loss, SGD, {}),
    "mlp, clipped": (partial(of_zoo, "mlp"), mean_loss, ADAM, {"clip_norm": 0.1}),
    "mlp, accumulated": (partial(of_zoo, "mlp"), mean_loss, ADAM, {"accumulate": 2}),
    "mlp, held": (partial(of_zoo, "mlp"), mean_loss, SGD, {"holds": True}),
    "mlp, decayed": (partial(of_zoo, "mlp"), mean_loss, ADAMW, {}),
    "mlp, not torch's": (partial(of_zoo, "mlp"), mean_loss, partial(OfTheUser, lr=0.1), {}),
    "gpt": (partial(of_zoo, "gpt_tied"), token_loss, SGD, {}),
    "embedding": (words, mean_loss, SGD, {}),
    "wide": (partial(of_zoo, "wide"), mean_loss, ADAM, {}),
    "mlp, two optimizers": (partial(of_zoo, "mlp"), mean_loss, ADAM, {"has_second": True}),
    "mlp, scaled": (partial(of_zoo, "mlp"), mean_loss, ADAM, {"scales": True}),
    "mlp, scaled and accumulated": (
        *(partial(of_zoo, "mlp"), mean_loss, ADAM, {"scales": True, "accumulate": 2}),
    ),
}


def steps(batches: Batches, parts: int) -> Iterator[Batches]:
    """Batches, by the updates that they make."""
    for first in range(0, len(batches) - len(batches) % parts, parts):
        yield batches[first : first + parts]


class Scaling:
    """Steps with a ``GradScaler`` where a loop scales its loss, and without one elsewhere."""

    def __init__(self, device: str, *, is_on: bool) -> None:
        kind = device.partition(":")[0]
        self._scaler = torch.amp.GradScaler(kind, init_scale=8.0, growth_interval=2, enabled=is_on)

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def step(self, optimizer: Any, **options: Any) -> None:
        self._scaler.step(optimizer, **options)
        self._scaler.update()


class Second:
    """An optimizer made in mid-training, of some of the parameters; in most loops none."""

    def __init__(self, model: nn.Module, loop: str, wrap: Callable[..., Any]) -> None:
        self._model, self._wrap = model, wrap
        self._loss_of, self._is_on = LOOPS[loop][1], LOOPS[loop][3].get("has_second")
        self._optimizer: Any = None

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        if self._is_on:
            some = list(self._model.parameters())[:3]
            self._optimizer = self._optimizer or self._wrap(SGD(some))
            loss, weight = self._loss_of(self._model, inputs, targets)
            self._model.zero_grad()
            loss.backward()
            self._optimizer.step(**({} if self._wrap is _as_is else {"weight": weight}))
            self._model.zero_grad()


def _as_is(optimizer: Any) -> Any:
    return optimizer


def loaded(loop: str) -> Batches:
    """The batches of a loop; of one that scales, a sample in the third overflows."""
    load, _, _, own = LOOPS[loop]
    batches: Batches = load()[1]
    if own.get("scales"):
        inputs, targets = batches[2]
        batches[2] = inputs.clone(), targets
        batches[2][0][-1] = math.inf
    return batches


def replicated(
    model: nn.Module, loop: str, device: str, *, is_compiled: bool = False
) -> dict[str, Any]:
    """Train on this replica's parts; the optimizer's state."""
    called: Any = torch.compile(model) if is_compiled else model
    _, loss_of, make, own = LOOPS[loop]
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in loaded(loop)]
    ours = ("holds", "scales", "has_second")
    options = {name: value for name, value in own.items() if name not in ours}
    scaling = Scaling(device, is_on=bool(own.get("scales")))
    if lockstep.rank():  # the first replica's count
        for one in model.parameters():
            nn.init.zeros_(one)
    optimizer = lockstep.CrossReplicaOptimizer(make(_trained(model)), model, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    parts = _parts(own)
    second = Second(model, loop, lambda some: lockstep.CrossReplicaOptimizer(some, model))
    for update in steps(odd(batches), parts):
        for number, batch in enumerate(update):
            inputs, targets = lockstep.share(batch)
            optimizer.zero_grad()
            loss, weight = loss_of(called, inputs, targets)
            scaling.backward(loss)
            if own.get("holds") and number < parts - 1:
                with optimizer.no_sync():
                    scaling.step(optimizer, weight=weight)
            else:
                scaling.step(optimizer, weight=weight)
        second.step(inputs, targets)
        schedule.step()
    optimizer.join()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)  # and goes on from there
    inputs, targets = lockstep.share(batches[0])
    for _ in range(own.get("accumulate", 1)):
        loss, weight = loss_of(called, inputs, targets)
        scaling.backward(loss)
        scaling.step(optimizer, weight=weight)
    return optimizer.state_dict()


def plain(model: nn.Module, loop: str) -> dict[str, Any]:
    """The same on one device: what makes an update is one batch."""
    _, loss_of, make, own = LOOPS[loop]
    batches = loaded(loop)
    optimizer, scaling = make(_trained(model)), Scaling("cpu", is_on=bool(own.get("scales")))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    updates = [
        tuple(torch.cat(each) for each in zip(*update, strict=True))
        for update in steps(odd(batches), _parts(own))
    ]
    second = Second(model, loop, _as_is)
    for number, batch in enumerate([*updates, batches[0]]):
        optimizer.zero_grad()
        loss, weight = loss_of(model, *batch)
        if weight:
            scaling.backward(loss)
            if "clip_norm" in own:
                nn.utils.clip_grad_norm_(model.parameters(), own["clip_norm"])
            scaling.step(optimizer)
        if number < len(updates):
            second.step(*batch)
            schedule.step()
    state: dict[str, Any] = optimizer.state_dict()
    return state


def _parts(own: dict[str, Any]) -> int:
    return 2 if own.get("holds") else int(own.get("accumulate", 1))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def differences(loop: str, device: str) -> dict[str, float]:
    """By tensor: ‖a − b‖ / max(‖b‖, S), with S the norm of all tensors of its kind."""
    is_compiled, loop = loop.endswith(COMPILED), loop.removesuffix(COMPILED)
    make_model = LOOPS[loop][0]()[0]
    # Not every accelerator has sparse gradients.
    model = make_model(device == "cpu").double().to(device)
    reference = make_model(False).double()
    state = replicated(model, loop, device, is_compiled=is_compiled)
    expected = plain(reference, loop)
    found = {}
    pairs: dict[str, Any] = {
        "parameters": (dict(model.named_parameters()), dict(reference.named_parameters()))
    }
    for slot in {slot for slots in expected["state"].values() for slot in slots}:
        pairs[slot] = tuple(
            {f"{slot} {number}": torch.as_tensor(slots[slot]) for number, slots in each.items()}
            for each in (state["state"], expected["state"])
        )
    for own, wanted in pairs.values():
        assert own.keys() == wanted.keys()
        scale = torch.stack([one.detach().double().norm() for one in wanted.values()]).norm()
        for name, one in wanted.items():
            found[name] = float((own[name].cpu() - one).detach().norm() / scale)
    return found


if __name__ == "__main__":
    where, *loops = sys.argv[1:]
    engine, _, kind = where.partition("@")
    torch.set_default_dtype(torch.float64)
    lockstep.init(timeout_seconds=60, engine=None if engine == "shared" else engine)
    device = "cpu"
    if kind == "tpu":
        lockstep.initialize_tpu_system()
        device = kind
    elif kind:
        device = f"{kind}:{lockstep.rank() % torch.accelerator.device_count()}"
    for loop in loops:
        found = differences(loop, device)
        told = {"loop": loop, "replicas": lockstep.num_replicas(), "found": found}
        line = json.dumps({"rank": lockstep.rank(), **told})
        sys.stdout.write(f"{line}\n")
