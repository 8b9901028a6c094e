"""Layers divided inside: bits over degrees, options of training, checkpoints, and what is refused.

The parity table has rows for whole trainings with two processes, and with two replicas of two.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import DeviceError, OptionError
from lockstep.parallel.tensor.divided_tensor import DividedTensor
from lockstep.train.trainer import Trainer

TENSOR, HYBRID = lockstep.TensorParallelStrategy, lockstep.HybridStrategy
INPUTS = torch.randn(48, 12, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 5, (48,), generator=torch.Generator().manual_seed(2))


class Residual(nn.Module):
    """A divided pair of layers with dropout between, a frozen layer, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.first.requires_grad_(False)
        self.start = nn.LayerNorm(12)
        self.up = nn.Linear(12, 22)
        self.down = nn.Linear(22, 12)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 5)
        self.seen: list[torch.Size] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(self.first(x))
        hidden = nn.functional.dropout(self.up(x).relu(), 0.3, self.training)
        output: Tensor = self.last(self.norm(x + self.down(hidden)))
        return output


class Experts(nn.Module):
    """Tokens go to two of five experts, then to another five that take a few each. One is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(5, *size)) for size in [(12, 14), (7, 12)])
        self.first, self.second = (
            nn.Parameter(torch.randn(5, *size) / 4) for size in [(12, 9), (9, 12)]
        )
        self.router = nn.Linear(12, 5)
        self.router.bias.data[4] = -99.0
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(x)
        for expert in range(5):
            rows, column = torch.where(chosen == expert)
            gate, up = (x[rows] @ self.up[expert]).chunk(2, -1)
            output = (gate.sigmoid() * up) @ self.down[expert]
            mixed.index_add_(0, rows, output * weights[rows, column, None])
        scores = self.router(mixed).softmax(-1)
        hot = nn.functional.one_hot(scores.argmax(-1), 5)
        place = nn.functional.one_hot((hot.cumsum(0) * hot).clamp(max=4), 5)[..., 1:4].to(x)
        hidden = torch.bmm(torch.einsum("tec,tw->ecw", place, mixed), self.first).tanh()
        taken = place * scores[..., None]
        output = torch.einsum("tec,ecw->tw", taken, torch.bmm(hidden, self.second))
        logits: Tensor = self.last(x + output)
        return logits


def trainer(strategy: lockstep.Strategy, model: nn.Module | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    options = {
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "precision": "fp64",
        **options,
    }
    model = Residual() if model is None else model
    return lockstep.Trainer(model, loss="cross_entropy", strategy=strategy, seed=3, **options)


def fit(one: Trainer, **options: Any) -> dict[str, Tensor]:
    one.fit((INPUTS, TARGETS), **{"batch_size": 14, "epochs": 2, "verbose": 0, **options})
    return {name: value.clone() for name, value in one.model.state_dict().items()}


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


_ALONE = TENSOR(3), lockstep.SingleDeviceStrategy()
_REPLICAS = HYBRID(2, tensor=2), lockstep.MirroredStrategy(1, num_shares=2)
_STAGES = HYBRID(pipe=2, tensor=2, microbatches=1), lockstep.SingleDeviceStrategy()


@pytest.mark.parametrize(
    ("strategy", "plain", "options"),
    [
        pytest.param(*_ALONE, {}, id="tensor", marks=pytest.mark.exhaustive),
        pytest.param(*_ALONE, {"clip_norm": 0.1}, id="tensor-clip_norm"),
        pytest.param(
            *_ALONE, {"accumulate": 2}, id="tensor-accumulate", marks=pytest.mark.exhaustive
        ),
        pytest.param(*_REPLICAS, {}, id="hybrid", marks=pytest.mark.exhaustive),
        pytest.param(
            *_REPLICAS, {"clip_norm": 0.1}, id="hybrid-clip_norm", marks=pytest.mark.exhaustive
        ),
        pytest.param(*_REPLICAS, {"accumulate": 2}, id="hybrid-accumulate"),
        pytest.param(
            *_STAGES, {"clip_norm": 0.1}, id="stages-clip_norm", marks=pytest.mark.thorough
        ),
    ],
)
def test_options_of_training(
    options: dict[str, Any], strategy: lockstep.Strategy, plain: lockstep.Strategy
) -> None:
    one = trainer(strategy, **options)
    found = fit(one)
    check_close(found, fit(trainer(plain, **options)))
    assert one.plan.tensor is not None
    assert {"up.weight", "down.weight"} <= {each.name for each in one.plan.tensor.parameters}


@pytest.mark.thorough
def test_a_weight_in_another_order_of_memory_over_gloo() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter((torch.randn(8, 12) / 3).t())
            self.down = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.down(torch.tanh(x @ self.up))
            return output

    job = lockstep.Job(Turned(), nn.CrossEntropyLoss(), torch.optim.SGD, (INPUTS, TARGETS), 12)
    report = lockstep.verify(job, TENSOR(2, engine="gloo"), steps=2)
    assert report.passed, str(report)


def test_images_in_channels_last_whose_shards_have_one_and_two_channels() -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x.to(memory_format=torch.channels_last)).relu()
            output: Tensor = self.down(hidden)
            return output

    images = torch.randn(6, 3, 4, 4), torch.randint(3, (6, 4, 4))
    job = lockstep.Job(Pixels(), nn.CrossEntropyLoss(), torch.optim.SGD, images, batch_size=3)
    report = lockstep.verify(job, TENSOR(2), steps=2)
    assert report.passed, str(report)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.exhaustive), "fp64"])
def test_the_same_shards_give_the_same_bits(precision: str) -> None:
    found = []
    for degree, engine in [(1, None), (2, None), (4, None), (2, "gloo"), (3, "gloo")]:
        strategy = TENSOR(degree, num_tensor_shards=4, engine=engine)
        one = trainer(strategy, precision=precision, clip_norm=0.1)
        found.append(fit(one))
        sharding = one.plan.sharding
        assert (sharding is not None and sharding.divides_parameters) is (engine == "gloo")
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


@pytest.mark.parametrize(
    ("degree", "same_bits"),
    [
        (4, [(1, None), (2, None)]),
        pytest.param(3, [(4, "gloo")], marks=pytest.mark.exhaustive),
    ],
)
def test_experts_are_divided(degree: int, same_bits: list[tuple[int, str | None]]) -> None:
    def trained(strategy: lockstep.Strategy) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return fit(trainer(strategy, Experts(), clip_norm=0.5), epochs=1)

    torch.manual_seed(0)
    plan = TENSOR(3).plan(Experts(), batch_size=14, sample=(INPUTS, TARGETS))
    assert plan.tensor is not None
    ways = {one.name: one.by for one in plan.tensor.parameters}
    assert [ways[name] for name in ("up", "down", "first", "second")] == [
        *("columns", "rows", "matrices", "matrices")
    ]
    found = trained(TENSOR(degree, num_tensor_shards=4))
    check_close(found, trained(lockstep.SingleDeviceStrategy()))
    for other, engine in same_bits:
        same = trained(TENSOR(other, num_tensor_shards=4, engine=engine))
        assert all(torch.equal(value, same[name]) for name, value in found.items())


class Sequences(nn.Module):
    """An encoder with dropout; logits of shape (samples, classes, times)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 12)
        layer = nn.TransformerEncoderLayer(12, 2, 20, 0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(12, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.encoder(self.embedding(tokens))).transpose(1, 2)
        return logits


def trained_on_sequences(strategy: lockstep.Strategy) -> dict[str, Tensor]:
    tokens = torch.randint(5, (20, 11), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    one = trainer(strategy, Sequences(), clip_norm=0.5)
    one.fit((tokens, tokens.flip(1)), batch_size=8, verbose=0)
    assert one.plan.tensor is None or "time" in str(one.plan)
    return {name: value.clone() for name, value in one.model.state_dict().items()}


@pytest.mark.parametrize(
    ("degree", "same_bits"),
    [
        (2, [(1, None)]),
        pytest.param(3, [(2, None), (4, None), (4, "gloo")], marks=pytest.mark.exhaustive),
    ],
)
def test_sequences_are_divided(degree: int, same_bits: list[tuple[int, str | None]]) -> None:
    found = trained_on_sequences(TENSOR(degree, num_tensor_shards=4, split="time"))
    check_close(found, trained_on_sequences(lockstep.SingleDeviceStrategy()))
    for other, engine in same_bits:
        strategy = TENSOR(other, num_tensor_shards=4, split="time", engine=engine)
        same = trained_on_sequences(strategy)
        assert all(torch.equal(value, same[name]) for name, value in found.items())


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [None, pytest.param("gloo", marks=pytest.mark.exhaustive)])
def test_replicas_divide_sequences(engine: str | None) -> None:
    make = partial(HYBRID, num_shares=2, num_tensor_shards=4, split="time", engine=engine)
    found = trained_on_sequences(make(2, tensor=2))
    check_close(found, trained_on_sequences(lockstep.MirroredStrategy(1, num_shares=2)))
    same = trained_on_sequences(make(1, tensor=3))
    assert all(torch.equal(value, same[name]) for name, value in found.items())


class WithoutBatchNorm(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)  # type: ignore[assignment]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"accumulate": 2}, marks=pytest.mark.exhaustive)],
    ids=["plain", "accumulate"],
)
def test_the_same_shares_and_shards_give_the_same_bits(options: dict[str, Any]) -> None:
    found = []
    runs = [(1, 1, None), (2, 1, None), (1, 2, None), (3, 2, None), (2, 2, "gloo")]
    for data, tensor, engine in runs:
        strategy = HYBRID(data, tensor=tensor, num_shares=3, num_tensor_shards=2, engine=engine)
        torch.manual_seed(0)
        one = trainer(strategy, WithoutBatchNorm(), precision="fp32", **options)
        one.fit((INPUTS[:26], TARGETS[:26]), batch_size=25, verbose=0)  # then a lone sample
        found.append({name: value.clone() for name, value in one.model.state_dict().items()})
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


def test_states_go_between_strategies() -> None:
    makes: list[Callable[[], lockstep.Strategy]] = [
        lockstep.SingleDeviceStrategy,
        partial(TENSOR, 2),
        lockstep.SingleDeviceStrategy,
    ]
    expected = trainer(lockstep.SingleDeviceStrategy())
    one = trainer(lockstep.SingleDeviceStrategy())
    for make in makes:
        fit(expected)
        before, one = one, trainer(make())
        one.load_state_dict(before.state_dict())
        fit(one)
    check_close(dict(one.model.state_dict()), dict(expected.model.state_dict()))


@pytest.mark.parametrize("strategy", [TENSOR(2), HYBRID(2, tensor=2)], ids=["tensor", "hybrid"])
def test_evaluate_and_predict(strategy: lockstep.Strategy) -> None:
    one, other = trainer(strategy), trainer(lockstep.SingleDeviceStrategy())
    found = one.evaluate((INPUTS, TARGETS), batch_size=20)
    assert found["loss"] == pytest.approx(
        other.evaluate((INPUTS, TARGETS), batch_size=20)["loss"], rel=1e-12
    )
    for inputs in (INPUTS, INPUTS[:1]):
        torch.testing.assert_close(
            one.predict(inputs, batch_size=20), other.predict(inputs, batch_size=20)
        )


@pytest.mark.parametrize("options", [{}, {"metrics": ["accuracy"]}], ids=["plain", "metrics"])
def test_logits_stay_divided_unless_metrics_need_them(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    gathered = []
    whole = DividedTensor.whole

    def noted(self: DividedTensor, func: Any = None) -> Tensor:
        gathered.append(tuple(self.shape))
        return whole(self, func)

    monkeypatch.setattr(DividedTensor, "whole", noted)
    one = trainer(TENSOR(1, num_tensor_shards=2), **options)
    data = INPUTS[:14], TARGETS[:14]
    one.fit(data, batch_size=14, verbose=0)
    gathered.clear()
    one.fit(data, batch_size=14, verbose=0)  # without a trial
    assert ((14, 5) in gathered) is bool(options)


def test_hooks_of_modules_see_whole_shapes() -> None:
    model = Residual()
    hook = lambda module, inputs, output: model.seen.append(output.shape)  # noqa: E731
    model.up.register_forward_hook(hook)
    model.down.register_full_backward_hook(lambda module, given, got: None)
    plain = Residual()
    plain.load_state_dict(model.state_dict())
    check_close(
        fit(trainer(TENSOR(2), model)), fit(trainer(lockstep.SingleDeviceStrategy(), plain))
    )
    assert torch.Size((14, 22)) in model.seen


def test_plans_say_how_layers_are_divided() -> None:
    torch.manual_seed(0)
    plan = TENSOR(2).plan(Residual(), batch_size=14, sample=(INPUTS, TARGETS))
    lines = {line.split()[0]: line for line in str(plan).splitlines()}
    assert lines["up"].endswith("columns")
    assert lines["down"].endswith("rows")
    assert lines["first"].endswith("gathered for layer_norm")
    assert lines["norm"].endswith("whole: used by batch_norm")
    assert lockstep.Plan.from_json(plan.to_json()) == plan


def test_named_modules_stay_whole() -> None:
    plan = TENSOR(2, whole=["up"]).plan(Residual(), batch_size=14, sample=(INPUTS, TARGETS))
    assert plan.tensor is not None
    assert "up.weight" in dict(plan.tensor.whole)


@pytest.mark.parametrize(
    ("strategy", "kind", "what"),
    [
        (partial(TENSOR, 2, num_tensor_shards=1), OptionError, "Every process needs a part"),
        (partial(TENSOR, 0), OptionError, "`degree` must be an integer"),
        (partial(TENSOR, 2, whole="up"), OptionError, "`whole` must be names"),
        (partial(TENSOR, 2, split="rows"), OptionError, "`split` must be"),
        (partial(TENSOR, 2, split="time", whole=["up"]), OptionError, "all layers are whole"),
        (partial(TENSOR, 4096), DeviceError, "4096"),
        (partial(HYBRID, 2, tensor=2, microbatches=2), OptionError, "without stages"),
        (partial(HYBRID, 2, 2, tensor=2, num_shares=4), OptionError, "Received: num_shares"),
        (partial(HYBRID, 2, 2, tensor=2, split="time"), OptionError, "Received: split"),
        (partial(HYBRID, 2, 2, tensor=2, num_tensor_shards=1), OptionError, "needs a part"),
        (partial(HYBRID, 2, 2, shard=2), OptionError, "divide the optimizer's slots only"),
        (partial(HYBRID, 2, 2, shard=2, level="slots", units=["up"]), OptionError, "units"),
        (partial(HYBRID, (2, 1), shard=2, level="slots"), OptionError, "`data` must be a number"),
        (partial(HYBRID, 2, shard=2, tensor=2), OptionError, "no layers inside"),
        (partial(HYBRID, 2, tensor=0), OptionError, "`degree` must be an integer"),
        (partial(HYBRID, 2, tensor=2, num_shares=1), OptionError, "Every replica needs a share"),
        (partial(HYBRID, 2, num_tensor_shards=2), OptionError, "Received: num_tensor_shards"),
        (partial(TENSOR, 2, devices=["cpu"]), OptionError, "1 devices for 2 processes"),
        (partial(HYBRID, 2, tensor=2, devices=["cpu"] * 2), OptionError, "for 2 processes"),
        (partial(TENSOR, 2, engine="mpi"), OptionError, "`engine` must be"),
        (partial(TENSOR, 2, engine="nccl"), OptionError, "does not move tensors"),
    ],
)
def test_arguments_are_checked(strategy: Any, kind: type[Exception], what: str) -> None:
    with pytest.raises(kind, match=what):
        strategy()


@pytest.mark.exhaustive
def test_bits_are_proven() -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    job = lockstep.Job(model, nn.CrossEntropyLoss(), torch.optim.SGD, (INPUTS, TARGETS), 12)
    report = lockstep.verify(job, TENSOR(2, num_tensor_shards=2), steps=2, bits=True)
    assert report.passed, str(report)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(OptionError, match="No layer of this model can be divided into 32 shards"):
        fit(trainer(TENSOR(1, num_tensor_shards=32)))
    with pytest.raises(OptionError, match="No layer of this model takes a tensor of shape"):
        fit(trainer(TENSOR(2, split="time")))
    with pytest.raises(OptionError, match="`whole` must name modules"):
        fit(trainer(TENSOR(2, whole=["encoder"])))
    with pytest.raises(OptionError, match="allow one share per replica"):
        fit(trainer(HYBRID(2, tensor=2, num_shares=3)))


def test_a_layer_whose_gradient_gets_a_hook_is_whole_from_then_on() -> None:
    model = Residual()
    one = trainer(TENSOR(2), model)
    fit(one, epochs=1)
    model.up.weight.register_hook(lambda gradient: gradient)
    assert one.plan.tensor is not None
    found = fit(one, epochs=1)
    assert found
    assert "up.weight" in dict(one.plan.tensor.whole)
