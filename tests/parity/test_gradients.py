"""What is done to gradients between their sum and the step: accumulation, clipping, refusals."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.errors import NonFiniteGradientError, NonFiniteLossError, OptionError
from lockstep.plan.makers.data_parallel import Accumulating, Maker
from lockstep.strategies.base import Strategy
from tests.thorough import core_of
from tests.zoo import Case, case, make_job

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": lockstep.SingleDeviceStrategy,
    "mirrored-2": partial(lockstep.MirroredStrategy, 2),
    "mirrored-3": partial(lockstep.MirroredStrategy, 3),
    "mirrored-2-shares-5": partial(lockstep.MirroredStrategy, 2, num_shares=5),
    "pipeline-2": partial(lockstep.PipelineStrategy, 2, microbatches=1),
}
FEW = ["single", "mirrored-2", "mirrored-3", "pipeline-2"]


class InParts(Strategy):
    """Another strategy, with accumulation."""

    def __init__(self, strategy: Strategy, parts: int) -> None:
        self.strategy, self.parts = strategy, parts
        self.timeout_seconds = 60.0

    def maker(self, precision: str = "fp32") -> Maker:
        return Accumulating(maker=self.strategy.maker(precision), parts=self.parts)

    @property
    def num_replicas_in_sync(self) -> int:
        return self.strategy.num_replicas_in_sync


# No number of shares divides a batch, and the last batches leave shares empty.
@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored-2", "pipeline-2"]))
@pytest.mark.parametrize(
    "model",
    core_of(
        ["mlp", "cnn_batch_norm", "cnn_dropout", "gpt_tied", "wide"], ["cnn_batch_norm", "wide"]
    ),
)
def test_accumulation_equals_one_device(model: str, strategy: str) -> None:
    if model == "cnn_batch_norm" and strategy == "pipeline-2":
        strategy = "mirrored-3"  # microbatches have statistics of their own, as the Plan says
    in_parts = InParts(STRATEGIES[strategy](), 3)
    report = lockstep.verify(make_job(case(model)), in_parts, steps=5)
    assert report.passed, str(report)


class _Normalised(nn.Module):
    """Normalises by the batch with a function, a layer, or a layer that runs as one piece."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(6)
        if kind == "hooked":
            self.norm.register_forward_hook(_look)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "function":
            return F.batch_norm(x, None, None, training=True)
        out: Tensor = self.norm(x)
        return out


def _look(module: nn.Module, args: Any, output: Tensor) -> None: ...


def normalised_job(kind: str, *, training: bool) -> lockstep.Job:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), _Normalised(kind), nn.Linear(6, 2))
    model[2].train(training)
    data = torch.randn(26, 4), torch.randn(26, 2)
    return lockstep.Job(model, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), data, 13)


@pytest.mark.parametrize("kind", ["layer", "hooked", "function"])
@pytest.mark.parametrize(
    "strategy",
    [
        lockstep.PipelineStrategy(2, microbatches=1),
        lockstep.HybridStrategy(2, 2, microbatches=2),
        lockstep.LocalSGDStrategy(every=1, devices=2, stages=2, microbatches=1),
    ],
    ids=["pipeline", "hybrid", "local"],
)
def test_accumulation_is_refused_where_a_pipeline_has_batch_statistics(
    strategy: Strategy, kind: str
) -> None:
    job = normalised_job(kind, training=True)
    with pytest.raises(OptionError, match=r"accumulate=3 with [12](\.norm)?\. Leave"):
        lockstep.verify(job, InParts(strategy, 3), steps=1)


def test_accumulation_in_a_pipeline_with_batch_norm_in_evaluation_mode() -> None:
    for kind in ("layer", "hooked"):
        job = normalised_job(kind, training=False)
        report = lockstep.verify(job, InParts(STRATEGIES["pipeline-2"](), 3), steps=2)
        assert report.passed, str(report)


def trained(one: Case, strategy: Strategy, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Five batches in order, in fp64; the model and its history."""
    model = one.make_model()
    trainer = lockstep.Trainer(
        model,
        loss=one.loss,
        optimizer=one.optimizer,
        strategy=strategy,
        precision="fp64",
        **options,
    )
    history = trainer.fit(
        (one.inputs, one.targets), batch_size=one.batch_size, shuffle=False, verbose=0
    )
    return model, history.history


def trained_plainly(one: Case, act: Callable[[nn.Module], object]) -> nn.Module:
    """The same with a loop; ``act`` comes between backward and step."""
    model = one.make_model().double()
    optimizer = one.optimizer(model.parameters())
    assert isinstance(one.inputs, Tensor)
    loss = one.loss
    for start in range(0, len(one.inputs), one.batch_size):
        rows = slice(start, start + one.batch_size)
        optimizer.zero_grad()
        returned = loss(model(one.inputs[rows]), one.targets[rows])
        value = returned[0] / returned[1] if isinstance(returned, tuple) else returned
        value.backward()
        act(model)
        optimizer.step()
    return model


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    """To the measure of docs/exactness.md."""
    others = [one.detach() for one in theirs.parameters()]
    scale = math.sqrt(sum(float(one.norm()) ** 2 for one in others))
    for (name, own), other in zip(ours.named_parameters(), others, strict=True):
        difference = float((own.detach() - other).norm())
        assert difference <= 1e-12 * max(float(other.norm()), scale), (name, difference)


@pytest.mark.parametrize("strategy", FEW)
@pytest.mark.parametrize("model", ["mlp", "gpt_tied"])
@pytest.mark.parametrize("accumulate", core_of([1, 3], [3]))
def test_clipping_by_global_norm(model: str, strategy: str, accumulate: int) -> None:
    one = case(model)
    norms: list[float] = []

    def clip(model: nn.Module) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))

    theirs = trained_plainly(one, clip)
    assert max(norms) > 0.1  # it does something
    ours, _ = trained(one, STRATEGIES[strategy](), clip_norm=0.1, accumulate=accumulate)
    assert_same(ours, theirs)


@pytest.mark.parametrize("strategy", FEW)
def test_clipping_by_value(strategy: str) -> None:
    one = case("mlp")
    theirs = trained_plainly(
        one, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.003)
    )
    ours, _ = trained(one, STRATEGIES[strategy](), clip_value=0.003)
    assert_same(ours, theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", core_of(["mlp", "wide", "cnn_batch_norm"], ["wide"]))
def test_bits_of_a_clipped_run_do_not_depend_on_the_number_of_devices(model: str) -> None:
    one = case(model)

    def weights(devices: int) -> list[Tensor]:
        strategy = lockstep.MirroredStrategy(devices, num_shares=4)
        torch.manual_seed(0)
        model = one.make_model()
        trainer = lockstep.Trainer(
            model, loss=one.loss, optimizer=one.optimizer, strategy=strategy, clip_norm=0.1
        )
        assert isinstance(one.inputs, Tensor)
        data = (one.inputs.float(), one.targets)
        trainer.fit(data, batch_size=one.batch_size, epochs=2, verbose=0)
        return [parameter.detach().clone() for parameter in model.parameters()]

    first = weights(1)
    for devices in (2, 3, 4):
        for own, other in zip(weights(devices), first, strict=True):
            assert own.equal(other)


# --- what is not finite --------------------------------------------------------------------------

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(5))
Y = torch.arange(40) % 3


def with_bad_row(row: int, value: float) -> tuple[Tensor, Tensor]:
    inputs = X.clone()
    inputs[row, 2] = value
    return inputs, Y


class Root(nn.Module):
    """Its gradient below 0 is NaN, its value is not."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * (x > 0)).square().sqrt()


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.abs())


def net(middle: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), middle, nn.Linear(8, 3))


def make_trainer(model: nn.Module, strategy: Strategy, **options: Any) -> lockstep.Trainer:
    return lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        strategy=strategy,
        **options,
    )


@pytest.mark.parametrize(
    "strategy", [*FEW, pytest.param("mirrored-2-shares-5", marks=pytest.mark.exhaustive)]
)
def test_a_loss_that_is_not_finite_leaves_everything_as_before(strategy: str) -> None:
    found = []
    for data in (with_bad_row(35, math.nan), (X, Y)):
        model = net(nn.Tanh())
        trainer = make_trainer(model, STRATEGIES[strategy]())
        if data[0].isfinite().all():
            trainer.fit((X[:30], Y[:30]), batch_size=10, shuffle=False, verbose=0)
        else:
            with pytest.raises(NonFiniteLossError, match="step 3"):
                trainer.fit(data, batch_size=10, shuffle=False, verbose=0)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in found[0].items():
        is_elsewhere = strategy == "pipeline-2" and ("running" in name or "num_batches" in name)
        assert is_elsewhere or value.equal(found[1][name]), name


def test_an_error_after_a_step_is_told_with_frozen_parameters_too() -> None:
    """Their slots, which nobody has, are not looked for."""
    model = net(nn.Tanh())
    model[3].weight.requires_grad_(False)  # type: ignore[index]
    trainer = make_trainer(model, STRATEGIES["mirrored-2"]())
    with pytest.raises(NonFiniteLossError, match="step 3"):
        trainer.fit(with_bad_row(35, math.nan), batch_size=10, shuffle=False, verbose=0)


@pytest.mark.parametrize("strategy", ["single", "mirrored-2", "mirrored-3"])
def test_the_first_layer_is_named(strategy: str) -> None:
    model = net(Logarithm())
    with torch.no_grad():
        model[1].weight.zero_()  # type: ignore[index]
    with pytest.raises(NonFiniteLossError, match=r"first in the output of layer '2' \(Logarithm"):
        make_trainer(model, STRATEGIES[strategy]()).fit((X, Y), batch_size=10, verbose=0)


@pytest.mark.parametrize("strategy", FEW)
def test_inputs_and_weights_that_are_not_finite_are_named(strategy: str) -> None:
    model = net(nn.Tanh())
    with torch.no_grad():
        model[3].weight[0, 0] = math.inf  # type: ignore[index]
    with pytest.raises(NonFiniteLossError, match=r"the weight '3\.weight' is not finite already"):
        make_trainer(model, STRATEGIES[strategy]()).fit((X, Y), batch_size=10, verbose=0)
    if strategy != "pipeline-2":
        trainer = make_trainer(net(nn.Tanh()), STRATEGIES[strategy]())
        with pytest.raises(NonFiniteLossError, match="the inputs are not finite already"):
            trainer.fit(with_bad_row(3, math.inf), batch_size=10, shuffle=False, verbose=0)


@pytest.mark.parametrize("strategy", FEW)
def test_a_gradient_that_is_not_finite_stops_before_the_update(strategy: str) -> None:
    model = net(Root())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[1].bias[4] = -100.0  # type: ignore[index]
        before["1.bias"][4] = -100.0
    with pytest.raises(NonFiniteGradientError, match=r"gradient of step 0.*'1\.(weight|bias)'"):
        make_trainer(model, STRATEGIES[strategy]()).fit((X, Y), batch_size=10, verbose=0)
    for name, value in model.state_dict().items():
        is_elsewhere = strategy == "pipeline-2" and name.startswith("1.")  # of the other stage
        assert value.equal(before[name]) or (is_elsewhere and "r" in name), name


@pytest.mark.parametrize("strategy", FEW)
def test_a_step_that_is_left_out_for_its_gradient_has_no_loss(strategy: str) -> None:
    inputs = 1.0 + X.abs()
    inputs[10:20] *= -1  # there the root has a value and no gradient
    found = []
    for rows in ([*range(30)], [*range(10), *range(20, 30)]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), Root(), nn.Linear(8, 3))
        with torch.no_grad():
            model[0].weight.abs_()  # type: ignore[operator]
        trainer = make_trainer(model, STRATEGIES[strategy](), on_nonfinite="skip")
        history = trainer.fit((inputs[rows], Y[rows]), batch_size=10, shuffle=False, verbose=0)
        found.append(history.history)
    assert found[0]["skipped_steps"] == [1]
    assert found[0]["loss"] == found[1]["loss"]


def test_a_large_gradient_is_finite() -> None:
    """Its squares overflow in float32."""
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    trainer = lockstep.Trainer(
        model,
        loss=lambda output, target: (output * 1e25).mean(),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        strategy=lockstep.MirroredStrategy(2),
        clip_norm=1.0,
    )
    trainer.fit((torch.ones(8, 4), torch.zeros(8)), batch_size=8, verbose=0)
    step = torch.cat([before - model.weight.detach(), torch.full((1, 1), 1 / math.sqrt(5))], 1)
    assert float(step.norm()) == pytest.approx(1.0, rel=1e-5)


def test_clipping_what_is_not_finite_is_torchs() -> None:
    model = net(nn.Tanh())
    trainer = make_trainer(
        model, lockstep.MirroredStrategy(2), on_nonfinite="ignore", clip_norm=1.0
    )
    trainer.fit(with_bad_row(3, math.nan), batch_size=40, verbose=0)
    assert all(bool(one.isnan().all()) for one in model.parameters())


class Scaled(nn.Module):
    """Counts its calls in a buffer that it assigns anew."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return torch.tanh(x * self.calls)


@pytest.mark.parametrize("middle", [nn.Tanh, Scaled])
@pytest.mark.parametrize("strategy", FEW)
def test_steps_that_are_not_finite_are_left_out(
    middle: Callable[[], nn.Module], strategy: str
) -> None:
    """As if these batches were not there, but for the random streams."""
    found = []
    others = [*range(10), *range(20, 40)]
    for data in (with_bad_row(15, math.nan), (X[others], Y[others])):
        model = net(middle())
        trainer = make_trainer(model, STRATEGIES[strategy](), on_nonfinite="skip")
        history = trainer.fit(data, batch_size=10, shuffle=False, verbose=0)
        found.append((model.state_dict(), history.history))
    (bad, with_bad), (good, with_good) = found
    assert with_bad["skipped_steps"] == [1]
    assert with_good["skipped_steps"] == [0]
    assert with_bad["loss"] == with_good["loss"]
    for name, value in bad.items():
        assert value.equal(good[name]), name


def test_what_is_not_finite_can_be_ignored() -> None:
    model = net(nn.Tanh())
    trainer = make_trainer(model, lockstep.MirroredStrategy(2), on_nonfinite="ignore")
    trainer.fit(with_bad_row(15, math.nan), batch_size=10, shuffle=False, verbose=0)
    assert not model[0].weight.isfinite().all()  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0}, "`clip_norm` must be a positive number"),
        ({"clip_value": "much"}, "`clip_value` must be a positive number"),
        ({"clip_norm": math.inf}, "`clip_norm` must be a positive number"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "by norm or by value"),
        ({"accumulate": 0}, "`accumulate` must be an integer of at least 1"),
        ({"accumulate": 2.0}, "`accumulate` must be an integer of at least 1"),
        ({"on_nonfinite": "stop"}, r"`on_nonfinite` must be one of \['raise', 'skip', 'ignore'\]"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_trainer(net(nn.Tanh()), lockstep.SingleDeviceStrategy(), **options)
