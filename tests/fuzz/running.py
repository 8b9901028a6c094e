"""A case on one plain device and under Lockstep, and what becomes of the comparison."""

import math
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import lockstep
from lockstep.data.order import epoch_order
from tests.fuzz.cases import STREAMS, Case, make_optimizer
from tests.fuzz.data import Data
from tests.fuzz.losses import LOSSES, plain_value
from tests.fuzz.nets import Net, make_model
from tests.fuzz.plain import PlainTraining, mixed

TOLERANCE = 1e-12  # of what is compared, relative to the norm of all that is of its kind
STEADY = 1e-14  # change by the order of the samples of which nothing more than rounding is made
SECONDS = 150.0  # that a rank may be waited for: other tests may have the cores

Values = dict[str, dict[str, Tensor]]  # by kind and name


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: "same", "wrong", "refused" by Lockstep, "crashed" with any other error, "undetermined"
            where rounding alone decides, "void" where the plain loop itself fails.
        text: what differs, or the error.
        case: as it was run.
    """

    kind: str
    text: str
    case: Any


class OwnLossModel(nn.Module):
    """A model that returns its loss."""

    def __init__(self, inner: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(
        self, first: Tensor, second: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        logits = self.inner(first, second)
        if labels is None:
            return {"logits": logits}
        return {"loss": self.loss(logits, labels), "logits": logits}


def own_step(loss: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
    """A training step of the user's own."""
    inputs, targets = batch[0], batch[1]
    if isinstance(inputs, dict):
        return loss(model(**inputs), targets)
    return loss(model(*inputs) if isinstance(inputs, tuple | list) else model(inputs), targets)


# --- the plain side ------------------------------------------------------------------------------


def loss_of(case: Case) -> Callable[[Any, Any, Tensor | None], Tensor | None]:
    """The loss of a batch."""
    table = LOSSES[case.loss]
    loss = table.make()

    def value(output: Any, target: Any, weights: Any) -> Any:
        if isinstance(output, dict):
            main = value(output["main"], target["main"], weights)
            each = ((output["other"] - target["other"]) ** 2).mean(1)
            other = each.mean() if weights is None else (each * weights).sum() / weights.sum()
            return other if main is None else main + other
        if weights is None:
            return plain_value(loss, output, target)
        assert table.values is not None
        return (table.values(output, target) * weights).sum() / weights.sum()

    return value


class Plain:
    """The case in a plain loop."""

    def __init__(self, case: Case, mix: int | None = None) -> None:
        self.case, self.data, self.mix = case, Data(case), mix
        model = make_model(case.shape, case.seed)
        for one in model.modules():
            if isinstance(one, nn.Embedding):
                one.sparse = False  # the same gradients, but dense
        optimizer = make_optimizer(case.optimizer, model.parameters(), groups=case.groups)
        options = {name: one for name, one in case.options.items() if name != "accumulate"}
        options["decay"] = options.pop("average", None)
        self.training = PlainTraining(
            model=model,
            loss_of=loss_of(case),
            optimizer=optimizer,
            schedule=make_schedule(optimizer) if case.schedule else None,
            schedule_every=case.schedule,
            **options,
        )
        self.epoch = 0
        self.found: dict[str, Tensor] = {}

    def run(self) -> Values:
        for number, action in enumerate(self.case.actions):
            self._act(f"{action} {number}", action)
        training = self.training
        weights = values_of(training.model, [], {}, {})["parameter"]
        average = {**weights, **training.average} if training.average else {}
        return values_of(training.model, training.losses, self.found, average)

    def _act(self, name: str, action: str) -> None:
        case, training = self.case, self.training
        match action:
            case "fit" | "validate":
                order = epoch_order(0, self.epoch, case.count, shuffle=self._shuffles)
                self.epoch += 1
                training.train([mixed(batch, self.mix) for batch in self.data.batches(order)])
                if action == "validate":
                    self.found[name] = self._evaluated()
            case "evaluate":
                self.found[name] = self._evaluated()
            case "predict":
                for one in training.predict(self.data.batches()):
                    outputs = one if isinstance(one, dict) else {"": one}
                    for key, value in outputs.items():
                        before = self.found.get(f"{name} {key}", value[:0])
                        self.found[f"{name} {key}"] = torch.cat([before, value])
            case _:
                change(action, training.model, training.optimizer)

    @property
    def _shuffles(self) -> bool:
        return self.case.shuffle and self.case.form not in STREAMS

    def _evaluated(self) -> Tensor:
        """Of losses that are means over samples, the mean over all."""
        if LOSSES[self.case.loss].values is None or self.case.own:
            return torch.zeros((), dtype=torch.float64)
        batches = self.data.batches()
        total = weight = torch.zeros((), dtype=torch.float64)
        outputs = self.training.predict(batches)
        for output, (inputs, targets, weights) in zip(outputs, batches, strict=True):
            value = self.training.loss_of(output, targets, weights)
            assert value is not None
            own = weights.sum() if weights is not None else torch.tensor(float(len(inputs[0])))
            total, weight = total + own * value, weight + own
        return total / weight


def make_schedule(optimizer: Any) -> optim.lr_scheduler.StepLR:
    return optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def change(action: str, model: nn.Module, optimizer: Any) -> None:
    """What a user does between two calls."""
    match action:
        case "freeze":
            inner = model.inner if isinstance(model, OwnLossModel) else model
            assert isinstance(inner, Net)
            if inner.head.bias is not None:  # else it is tied to what may be all else
                inner.head.requires_grad_(False)
        case "rate":
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def values_of(
    model: nn.Module,
    losses: list[float],
    found: dict[str, Tensor],
    average: dict[str, Tensor],
) -> Values:
    inner = model.inner if isinstance(model, OwnLossModel) else model
    assert isinstance(inner, nn.Module)
    return {
        "parameter": {name: one.detach().clone() for name, one in inner.named_parameters()},
        "buffer": {name: one.clone() for name, one in inner.named_buffers()},
        "loss": {
            str(step): torch.tensor(one, dtype=torch.float64) for step, one in enumerate(losses)
        },
        "result": found,
        "average": average,
    }


# --- Lockstep's side -----------------------------------------------------------------------------


class Losses(lockstep.Callback):
    """The loss of every step."""

    is_observer = True

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not math.isnan(logs["loss"]):  # nothing in the batch counts
            self.losses.append(logs["loss"])


class Divided:
    """The case under Lockstep."""

    def __init__(self, case: Case) -> None:
        self.case, self.data = case, Data(case)
        self.callback = Losses()
        self.found: dict[str, Tensor] = {}
        self.trainer = self._make(case)

    def run(self) -> Values:
        try:
            for number, action in enumerate(self.case.actions):
                self._act(f"{action} {number}", action)
            average: dict[str, Tensor] = {}
            if "average" in self.case.options:
                with self.trainer.averaged():
                    average = self._values()["parameter"]
            return {**self._values(), "average": average}
        finally:
            self.trainer.close()

    def _values(self) -> Values:
        return values_of(self.trainer.model, self.callback.losses, self.found, {})

    def _make(self, case: Case) -> lockstep.Trainer:
        model = make_model(case.shape, case.seed)
        loss = LOSSES[case.loss].make()
        given: dict[str, Any] = {"loss": loss}
        if case.shape.heads == 2:
            given["loss"] = {"main": loss, "other": nn.MSELoss()}
        if case.own == "model":
            model, given["loss"] = OwnLossModel(model, loss), lockstep.OwnLoss()
        if case.own == "step":
            given["train_step"] = partial(own_step, loss)
        make = partial(make_optimizer, case.optimizer, groups=case.groups)
        options = dict(case.options)
        if "average" in options:
            options["average"] = lockstep.EMA(options["average"])
        if case.schedule:
            options["schedule"] = lockstep.Schedule(make_schedule, every=case.schedule)
        return lockstep.Trainer(
            model,
            optimizer=make(model.parameters()) if case.is_made else make,
            strategy=strategy_of(case),
            precision="fp64",
            callbacks=[self.callback],
            **given,
            **options,
        )

    def _act(self, name: str, action: str) -> None:
        case, trainer = self.case, self.trainer
        size = {"batch_size": case.batch_size}
        match action:
            case "fit" | "validate":
                validation = self.data.given("tensors") if action == "validate" else None
                history = trainer.fit(
                    self.data.given(case.form),
                    validation_data=validation,
                    verbose=0,
                    **self.data.options,
                )
                if action == "validate":
                    self._note_loss(name, history.history["val_loss"][-1])
            case "evaluate":
                self._note_loss(name, trainer.evaluate(self.data.given("tensors"), **size)["loss"])
            case "predict":
                outputs = trainer.predict(self.data.given_inputs(), **size)
                if not isinstance(outputs, dict):
                    outputs = {"": outputs}
                for key, value in outputs.items():
                    self.found[f"{name} {'' if key == 'logits' else key}"] = value
            case "save":
                with tempfile.TemporaryDirectory() as folder:
                    trainer.save(Path(folder) / "weights.safetensors")
                    with torch.no_grad():
                        for one in trainer.model.parameters():
                            one.zero_()
                    trainer.load(Path(folder) / "weights.safetensors")
            case "elsewhere":
                state = trainer.state_dict()
                trainer.close()
                strategy, layout = case.other
                self.trainer = self._make(replace(case, strategy=strategy, layout=layout))
                self.trainer.load_state_dict(state)
            case _:
                change(action, trainer.model, trainer.optimizer)

    def _note_loss(self, name: str, value: float) -> None:
        is_mean = LOSSES[self.case.loss].values is not None and not self.case.own
        self.found[name] = torch.tensor(value if is_mean else 0.0, dtype=torch.float64)


def strategy_of(case: Any) -> lockstep.Strategy:
    """Where a case is trained."""
    limits = {} if case.strategy == "SingleDeviceStrategy" else {"timeout_seconds": SECONDS}
    made: lockstep.Strategy = getattr(lockstep, case.strategy)(**case.layout, **limits)
    return made


# --- comparing -----------------------------------------------------------------------------------


def difference(theirs: Values, ours: Values) -> tuple[float, str]:
    """The largest difference by the measure of docs/exactness.md, and where."""
    worst, where = 0.0, ""
    for kind, wanted in ours.items():
        found = theirs[kind]
        if found.keys() != wanted.keys():
            return math.inf, f"{kind}: {sorted(found)} instead of {sorted(wanted)}"
        floating = [one for one in wanted.values() if one.is_floating_point()]
        scale = math.sqrt(sum(float(one.norm()) ** 2 for one in floating))
        for name, one in wanted.items():
            far = distance(found[name], one, scale)
            if not far <= worst:
                worst, where = far, f"{kind} {name}"
    return worst, where


def distance(theirs: Tensor, ours: Tensor, scale: float) -> float:
    if theirs.shape != ours.shape:
        return math.inf
    if not ours.is_floating_point():
        return 0.0 if torch.equal(theirs, ours) else math.inf
    far = float((theirs.double() - ours.double()).norm())
    return far / scale if far and scale else far


@dataclass(frozen=True)
class Settled:
    """A case that can be compared, with the plain loop's values; or why there is none."""

    case: Any
    values: Values | None = None
    outcome: str = ""
    text: str = ""


def settled(cases: Iterable[Any], plain: Callable[[Any, int | None], Values]) -> Settled:
    """The first of some cases in which rounding stays what it is.

    Args:
        cases: the one that was drawn, and others in its place.
        plain: a case's values in a plain loop, with the samples of every batch in another order
            where a number says which: that changes nothing but rounding.
    """
    found = None
    for case in cases:
        found = found or case
        try:
            ours = plain(case, None)
            shaken = [difference(plain(case, mix), ours)[0] for mix in (1, 2)]
        except Exception:  # whatever torch says
            return Settled(case, outcome="void", text=traceback.format_exc())
        if all(far <= STEADY for far in shaken):
            return Settled(case, ours)
    return Settled(found, outcome="undetermined")


def failed(error: Exception, case: Any, kind: str) -> Outcome:
    """What an error comes to: a refusal, or else what ``kind`` says."""
    if isinstance(error, lockstep.LockstepError):
        return Outcome("refused", f"{type(error).__name__}: {error}", case)
    return Outcome(kind, "".join(traceback.format_exception(error)), case)


def judged(one: Settled, divided: Callable[[Any], Values], limit: float = TOLERANCE) -> Outcome:
    """What becomes of a case under Lockstep."""
    if one.values is None:
        return Outcome(one.outcome, one.text, one.case)
    try:
        far, where = difference(divided(one.case), one.values)
    except Exception as error:
        return failed(error, one.case, "crashed")
    if far <= limit:
        return Outcome("same", f"{far:.1e}", one.case)
    return Outcome("wrong", f"{where}: {far:.1e}", one.case)


def run(case: Case) -> Outcome:
    """Run a case on both sides."""
    calm = replace(case, optimizer="sgd", groups=False)
    calmer = replace(calm, options={**case.options, "clip_norm": 1e-3})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = settled((case, calm, calmer), lambda one, mix: Plain(one, mix).run())
        return judged(found, lambda one: Divided(one).run())


def run_bits(case: Case) -> Outcome:
    """Run a case under two layouts with the same shares: equal in every bit."""
    layout = case.layout
    shares = layout.get("num_shares") or layout.get("devices") or layout.get("workers") or 1
    alone = {"devices": 1, "num_shares": shares}
    on_one = replace(case, strategy="MirroredStrategy", layout=alone)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours = Divided(on_one).run()
        except Exception as error:
            return failed(error, case, "void")
        return judged(Settled(case, ours), lambda one: Divided(one).run(), limit=0.0)
