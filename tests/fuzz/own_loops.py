"""Random loops of users' own with ``CrossReplicaOptimizer``, against a plain loop.

This file is also the script that ``lockstep run`` starts on each replica: its arguments are cases,
and replica 0 tells what has become of each.
"""

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from tests.fuzz.cases import OPTIMIZERS, Case, make_optimizer
from tests.fuzz.data import Data
from tests.fuzz.losses import IGNORED, LOSSES
from tests.fuzz.nets import Shape, make_model
from tests.fuzz.plain import mixed
from tests.fuzz.running import Outcome, Values, judged, make_schedule, settled, values_of
from tests.fuzz.showing import Repr

ROOT = Path(__file__).parents[2]
SECONDS = 300.0
MEANS = [name for name, loss in LOSSES.items() if loss.values is not None or name == "tokens"]


@dataclass(frozen=True, kw_only=True, repr=False)
class LoopCase(Repr):
    """A loop: ``training`` says of what, ``options`` are the wrapper's.

    Attributes:
        training: model, data, loss and optimizer.
        replicas: how many there are.
        engine: what moves tensors between them.
        options: ``accumulate`` and ``clip_norm``.
        holds: every other step is made within ``no_sync``.
        schedule: the learning rate has one.
        scales: the loss is scaled, and a ``GradScaler`` steps.
    """

    training: Case = field(default_factory=Case)
    replicas: int = 2
    engine: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    holds: bool = False
    schedule: bool = False
    scales: bool = False

    @property
    def parts(self) -> int:
        """Calls of ``step`` that make an update."""
        return 2 if self.holds else int(self.options.get("accumulate", 1))


def draw(seed: int) -> LoopCase:
    from tests.fuzz.blocks import BATCH_NORMS, RANDOM
    from tests.fuzz.cases import draw_shape

    rng = random.Random(f"loops {seed}")
    shape = draw_shape(rng, RANDOM | BATCH_NORMS | {"parameter hook"})
    own = replace(shape, heads=1)
    losses = [name for name in MEANS if (LOSSES[name].target == "tokens") == shape.per_token]
    batch_size = rng.choice((4, 6, 7, 9))
    optimizer = rng.choice(("sgd", "sgd with momentum", *OPTIMIZERS))
    if "tokens, sparse" in (own.entry, own.second):
        optimizer = "sgd"
    if optimizer == "adafactor" and "scalars" in (*own.body, *own.tail):
        optimizer = "adam"
    options: dict[str, Any] = {"clip_norm": 0.05} if rng.random() < 0.3 else {}
    holds = rng.random() < 0.2
    if not holds and rng.random() < 0.3:
        options["accumulate"] = 2
    missing = rng.choice((0, 1, batch_size - 1))
    is_whole = "complex" in (*own.body, *own.tail)  # Fourier transforms refuse an empty share
    training = Case(
        shape=own,
        loss=rng.choice(losses),
        optimizer=optimizer,
        groups=rng.random() < 0.3,
        count=4 * batch_size - (0 if is_whole else missing),
        batch_size=batch_size,
        seed=seed,
    )
    return LoopCase(
        training=training,
        replicas=rng.choice((2, 2, 3)),
        engine=rng.choice(("", "", "gloo")),
        options=options,
        holds=holds,
        schedule=rng.random() < 0.3,
        scales=rng.random() < 0.2,
    )


# --- on each replica -----------------------------------------------------------------------------


def mean_loss(case: Case, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """A mean, and what it is a mean over."""
    inputs, targets = batch
    output, loss = model(*inputs), LOSSES[case.loss].make()
    value = loss(output, targets)
    weight = float((targets != IGNORED).sum()) if case.loss == "tokens" else float(len(targets))
    return (value.mean() if value.dim() else value), weight


def updates(case: LoopCase, mix: int | None = None) -> list[list[Any]]:
    """Batches, by the updates that they make."""
    batches = [mixed(batch, mix)[:2] for batch in Data(case.training).batches()]
    whole = len(batches) - len(batches) % case.parts
    return [batches[first : first + case.parts] for first in range(0, whole, case.parts)]


def replicated(case: LoopCase) -> Values:
    training = case.training
    model = make_model(training.shape, training.seed)
    if lockstep.rank():  # the first replica's count
        for one in model.parameters():
            nn.init.zeros_(one)
    own = make_optimizer(training.optimizer, model.parameters(), groups=training.groups)
    optimizer = lockstep.CrossReplicaOptimizer(own, model, **case.options)
    schedule = make_schedule(optimizer) if case.schedule else None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1, enabled=case.scales)
    losses: list[float] = []
    for update in updates(case):
        for number, batch in enumerate(update):
            loss, weight = mean_loss(training, model, lockstep.share(batch))
            scaler.scale(loss).backward()
            if case.holds and number < case.parts - 1:
                with optimizer.no_sync():
                    scaler.step(optimizer, weight=weight)
            else:
                scaler.step(optimizer, weight=weight)
            scaler.update()
            losses.append(float(lockstep.all_mean(loss.item() if weight else 0.0, weight)))
        if schedule is not None:
            schedule.step()
    optimizer.join()
    return values_of(model, losses, {}, {})


def plain(case: LoopCase, mix: int | None = None) -> Values:
    """The same on one device: what makes an update is one batch."""
    training = case.training
    model = make_model(training.shape, training.seed)
    for one in model.modules():
        if isinstance(one, nn.Embedding):
            one.sparse = False
    optimizer = make_optimizer(training.optimizer, model.parameters(), groups=training.groups)
    schedule = make_schedule(optimizer) if case.schedule else None
    losses: list[float] = []
    for update in updates(case, mix):
        model.zero_grad()
        pairs = [mean_loss(training, model, batch) for batch in update]
        whole = sum(weight for _, weight in pairs)
        torch.stack([loss * (weight / whole) for loss, weight in pairs]).sum().backward()
        if "clip_norm" in case.options:
            stepped = [one for group in optimizer.param_groups for one in group["params"]]
            nn.utils.clip_grad_norm_(stepped, case.options["clip_norm"])
        optimizer.step()
        losses += [loss.item() for loss, _ in pairs]
        if schedule is not None:
            schedule.step()
    return values_of(model, losses, {}, {})


def _judge(case: LoopCase) -> Outcome:
    calm = replace(case, training=replace(case.training, optimizer="sgd", groups=False))
    return judged(settled((case, calm), plain), replicated)


# --- from outside --------------------------------------------------------------------------------


def run(case: LoopCase) -> Outcome:
    """Run a case in processes of its own."""
    return run_all([case])[0]


def run_all(cases: Sequence[LoopCase]) -> list[Outcome]:
    """Run cases of the same replicas and engine in one start."""
    words = [sys.executable, "-m", "lockstep", "run", "--processes", str(cases[0].replicas)]
    done = subprocess.run(
        [*words, __file__, *map(repr, cases)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
        check=False,
    )
    found = told(done.stdout)
    rest = cases[len(found) :]
    return found + [Outcome("crashed", done.stderr or done.stdout, case) for case in rest]


def told(out: str) -> list[Outcome]:
    """What replica 0 says that has become of the cases."""
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('["')]
    return [Outcome(kind, text, _made(case)) for kind, text, case in lines]


def _made(text: str) -> LoopCase:
    case: LoopCase = eval(text, {"LoopCase": LoopCase, "Case": Case, "Shape": Shape})
    return case


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = list(map(_made, sys.argv[1:]))
    lockstep.init(timeout_seconds=120, engine=cases[0].engine or None)
    for case in cases:
        outcome = _judge(case)
        if lockstep.rank() == 0:
            line = json.dumps([outcome.kind, outcome.text, repr(outcome.case)])
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
