"""What a forward pass changes, and what it looks at: the same on shares of a batch, or refused."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

import lockstep
from lockstep.errors import LossError, ModelError
from lockstep.strategies.base import Strategy

pytestmark = pytest.mark.thorough

torch.manual_seed(3)
X, Y = torch.randn(40, 6), torch.randint(0, 3, (40,))

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "mirrored-2": partial(lockstep.MirroredStrategy, 2),
    "shares-5": partial(lockstep.MirroredStrategy, 2, num_shares=5),
    "pipeline-2": partial(lockstep.PipelineStrategy, cuts=["cut"], microbatches=3),
    "hybrid-2x2": partial(lockstep.HybridStrategy, 2, cuts=["cut"], microbatches=2),
}

# In replicas of a pipeline a forward pass is that of a pipeline, and its shares those of replicas.
FEWER = [
    pytest.param(name, marks=pytest.mark.exhaustive) if name == "hybrid-2x2" else name
    for name in STRATEGIES
]


class Counts(nn.Module):
    """Its output depends on how often it was called, which a buffer counts."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * (1 + self.calls.clone())


class Averages(nn.Module):
    """Keeps an average of what it has seen, from the third step of training on."""

    steps: Tensor
    seen: Tensor

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(8), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
            late = (self.steps > 2).to(x.dtype)
            self.seen.lerp_(x.detach().mean(0).to(self.seen), 0.1 * late)
        return x


def net(*layers: nn.Module) -> nn.Module:
    model = nn.Sequential(*layers)
    model.add_module("cut", nn.Tanh())
    model.add_module("last", nn.Linear(8, 3))
    return model


def job_of(model: nn.Module) -> lockstep.Job:
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return lockstep.Job(model, nn.CrossEntropyLoss(), optimizer, (X, Y), batch_size=13)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_depends_on_no_sample_changes_once_per_batch(strategy: str) -> None:
    torch.manual_seed(0)
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    report = lockstep.verify(job_of(net(first, Counts())), STRATEGIES[strategy](), steps=4)
    assert report.passed, report


class Grows(nn.Module):
    """Its first pass gives a buffer its size, as those of torch's observers for quantization do."""

    low: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        self.low.resize_(x.shape[1:]).fill_(float(self.low.numel()))
        return x + self.low.clone()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_buffer_that_the_first_pass_resizes(parts: int) -> None:
    """Every part of a batch begins with its size before the batch."""
    model = net(nn.Linear(6, 8), Grows())
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in zip(X.split(13), Y.split(13), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        accumulate=parts,
    )
    trainer.fit((X, Y), batch_size=13, shuffle=False, verbose=0)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


class Observes(nn.Module):
    """Resizes a buffer as torch's observers of each channel do, and those of histograms."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.detach_().resize_(x.shape[1:]).fill_(0.5)
        return x * self.scale.clone()


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["mirrored-2", "shares-5", "pipeline-2"])
def test_every_rank_may_resize_a_buffer(strategy: str) -> None:
    job = job_of(net(nn.Linear(6, 8), Observes(), nn.Linear(8, 8), Observes()))
    report = lockstep.verify(job, STRATEGIES[strategy](), steps=2)
    assert report.passed, report


class Largest(nn.Module):
    """Calibrates: keeps the largest value that it has seen."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", ["evaluate", "predict"])
@pytest.mark.parametrize("strategy", ["one", *STRATEGIES])
def test_calibration_sees_all_samples_or_is_refused(strategy: str, call: str) -> None:
    model = net(nn.Linear(6, 8), Largest())
    expected = copy.deepcopy(model).eval()
    expected(X)
    strategies = {**STRATEGIES, "one": lockstep.SingleDeviceStrategy}
    trainer = lockstep.Trainer(model, loss=nn.CrossEntropyLoss(), strategy=strategies[strategy]())
    run = getattr(trainer, call)
    data = (X, Y) if call == "evaluate" else X
    if strategy == "one":
        run(data, batch_size=13)
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
        return
    with pytest.raises(ModelError, match=r"buffer '1.largest'.*does not train"):
        run(data, batch_size=13)


@pytest.mark.parametrize("strategy", FEWER)
def test_what_depends_on_the_samples_is_refused(strategy: str) -> None:
    """Also where it begins late: steps 1, 2, 4, 8 and so on are looked at."""
    model = net(nn.Linear(6, 8), Averages())
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        strategy=STRATEGIES[strategy](),
    )
    with pytest.raises(
        ModelError, match=r"buffer '1\.seen', which differs between shares of one batch"
    ):
        trainer.fit((X, Y), batch_size=10, verbose=0)
    assert int(model[1].steps) <= 4  # type: ignore[index]


class Measured(nn.Module):
    """Keeps the mean of its outputs, as models of Lightning keep metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(nn.Linear(6, 8))
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x)
        self.mean.update(outputs.detach())
        return outputs


@pytest.mark.parametrize("devices", [1, 2])
def test_a_metric_within_the_model_sees_all_samples_or_is_refused(devices: int) -> None:
    model = Measured()
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(devices),
    )
    if devices == 1:
        trainer.fit((X, Y), batch_size=10, verbose=0)
        assert model.mean.weight == 3 * len(X)
        return
    with pytest.raises(ModelError, match=r"metrics=\{\.\.\.\}"):
        trainer.fit((X, Y), batch_size=10, verbose=0)


@pytest.mark.parametrize(
    "strategy", ["mirrored-2", pytest.param("pipeline-2", marks=pytest.mark.exhaustive)]
)
def test_statistics_of_instance_norm_are_refused(strategy: str) -> None:
    norm = nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    )
    with pytest.raises(ModelError, match="track_running_stats=False"):
        lockstep.verify(job_of(net(nn.Linear(6, 8), norm)), STRATEGIES[strategy]())


class Teacher(nn.Module):
    """Follows another layer's weights."""

    def __init__(self, follow: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.follow(self.teacher.weight, self.student.weight)
        output: Tensor = self.student(x) + self.teacher(x)
        return output


def in_place(teacher: Tensor, student: Tensor) -> None:
    teacher.lerp_(student, 0.1)


def in_data(teacher: Tensor, student: Tensor) -> None:
    teacher.data.lerp_(student.data, 0.1)


def anew(teacher: Tensor, student: Tensor) -> None:
    teacher.data = teacher.data.lerp(student.data, 0.1)


@pytest.mark.parametrize("strategy", ["mirrored-2", "pipeline-2"])
@pytest.mark.parametrize("follow", [in_place, in_data, anew])
def test_a_forward_pass_that_changes_parameters_is_refused(
    follow: Callable[[Tensor, Tensor], object], strategy: str
) -> None:
    seen = r"a change of '0\.teacher\.weight'"
    if strategy == "mirrored-2":  # a rank may see another change it while it tries its share
        seen += "|must not depend on the other samples|must be the sum of its samples"
    with pytest.raises(ModelError, match=seen):
        lockstep.verify(job_of(net(Teacher(follow))), STRATEGIES[strategy]())


@pytest.mark.parametrize("strategy", ["mirrored-2", "pipeline-2"])
def test_rows_that_are_shortened_are_refused_where_ranks_share_them(strategy: str) -> None:
    torch.manual_seed(0)
    model = net(nn.EmbeddingBag(20, 8, max_norm=0.5))
    job = lockstep.Job(
        model, nn.CrossEntropyLoss(), torch.optim.Adam, (torch.randint(0, 20, (40, 5)), Y), 13
    )
    if strategy == "pipeline-2":
        assert lockstep.verify(job, STRATEGIES[strategy]()).passed
    else:
        with pytest.raises(ModelError, match="max_norm=None"):
            lockstep.verify(job, STRATEGIES[strategy]())


class Acting(nn.Module):
    """A layer that does ``act`` to its inputs."""

    def __init__(self, act: Callable[["Acting", Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


def centred(module: Acting, x: Tensor) -> Tensor:
    return x - x.mean(0)


def decided(module: Acting, x: Tensor) -> Tensor:
    return x * 2 if x[0, 0] > 0 else x


def reminded(module: Acting, x: Tensor) -> Tensor:
    before, module.last = module.last, x.detach().mean(0)
    return x if before is None else x + before


def carried(module: Acting, x: Tensor) -> Tensor:
    """As a recurrent state that begins anew where the number of samples is another."""
    before, module.last = module.last, x.detach()
    return x if before is None or before.shape != x.shape else x + before


def counted(module: Acting, x: Tensor) -> Tensor:
    module.calls += 1
    return x * (1 + 1 / module.calls)


def shown(module: Acting, x: Tensor) -> Tensor:
    module.last = x.detach()  # for whoever wants to look
    return x * (torch.rand(len(x), 1) < 0.5)


def penalised(module: Acting, x: Tensor) -> Tensor:
    seen = x.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(seen.square().sum(), seen)
    return x + slope


@pytest.mark.parametrize(
    ("act", "strategy", "message"),
    [
        (centred, "mirrored-2", "must not depend on the other samples of its batch"),
        (centred, "pipeline-2", "must not depend on the other samples of its batch"),
        (decided, "mirrored-2", "must not depend on the other samples of its batch"),
        (reminded, "mirrored-2", "must not depend on the samples of earlier batches"),
        (carried, "mirrored-2", "must not depend on the samples of earlier batches"),
        (carried, "pipeline-2", "must not depend on the samples of earlier batches"),
    ],
)
def test_a_model_that_looks_across_samples_is_refused(
    act: Callable[[Acting, Tensor], Tensor], strategy: str, message: str
) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=message):
        lockstep.verify(job_of(net(nn.Linear(6, 8), Acting(act))), STRATEGIES[strategy]())


@pytest.mark.parametrize(("strategy", "accumulate"), [("mirrored-2", 2), ("shares-5", 1)])
def test_what_is_carried_to_the_next_part_is_refused(strategy: str, accumulate: int) -> None:
    """Several parts of a batch are of one size."""
    trainer = lockstep.Trainer(
        net(nn.Linear(6, 8), Acting(carried)),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=STRATEGIES[strategy](),
        accumulate=accumulate,
    )
    with pytest.raises(ModelError, match="must not depend on the samples of earlier batches"):
        trainer.fit((X, Y), batch_size=20, verbose=0)


@pytest.mark.parametrize("strategy", ["mirrored-2", "pipeline-2", "sharded-2"])
def test_it_is_refused_as_well_where_it_is_not_trained(strategy: str) -> None:
    sharded = partial(lockstep.FullyShardedStrategy, 2, engine="gloo")
    divided = sharded() if strategy == "sharded-2" else STRATEGIES[strategy]()
    model = net(nn.Linear(6, 8), Acting(centred))
    trainer = lockstep.Trainer(model, loss=nn.CrossEntropyLoss(), strategy=divided)
    with pytest.raises(ModelError, match="must not depend on the other samples"):
        trainer.predict(X, batch_size=20)
    with pytest.raises(ModelError, match="must not depend on the other samples"):
        trainer.evaluate((X, Y), batch_size=20)


class ComparesItself(nn.Module):
    """Computes a loss that compares samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(nn.Linear(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return nn.functional.cross_entropy(made @ made.T, torch.arange(len(made)))


def test_a_loss_of_a_model_that_is_not_trained() -> None:
    strategy = lockstep.MirroredStrategy(2)
    trainer = lockstep.Trainer(ComparesItself(), loss=lockstep.OwnLoss(), strategy=strategy)
    with pytest.raises(LossError, match="must be a weighted mean"):
        trainer.evaluate((X,), batch_size=20)


@pytest.mark.parametrize("compares", [False, True])
def test_the_planner_then_divides_no_batch(compares: bool) -> None:
    """Plans of least memory divide batches; the next one, which does not, trains the model."""
    torch.manual_seed(0)
    model = ComparesItself() if compares else net(nn.Linear(6, 8), Acting(centred))
    reference = copy.deepcopy(model).double()
    loss = lockstep.OwnLoss() if compares else nn.CrossEntropyLoss()
    trainer = lockstep.Trainer(
        model,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.AutoStrategy("memory", devices=2),
        precision="fp64",
    )
    trainer.fit((X,) if compares else (X, Y), batch_size=20, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in zip(X.double().split(20), Y.split(20), strict=True):
        optimizer.zero_grad()
        made = reference(x)
        (made if compares else nn.functional.cross_entropy(made, y)).backward()
        optimizer.step()
    for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (own - other).norm() <= 1e-12 * other.norm(), name
    reason = "loss that the model" if compares else "model's output for a sample"
    notes = [note for note in trainer.plan.notes if "cannot be used" in note]
    assert len(notes) == 1, trainer.plan.notes
    assert reason in notes[0]
    assert "\n" not in notes[0]


@pytest.mark.parametrize("act", [counted, shown, penalised])
def test_a_model_that_does_not_is_not(act: Callable[[Acting, Tensor], Tensor]) -> None:
    """Whatever it counts, keeps, draws by sample, or takes gradients of."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), Acting(act)
    report = lockstep.verify(job_of(net(*layers)), lockstep.MirroredStrategy(2), steps=3)
    assert report.passed, report


def test_caches_are_each_devices_own() -> None:
    model = net(nn.Linear(6, 8), Averages(persistent=False))
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(2),
    )
    trainer.fit((X, Y), batch_size=10, verbose=0)
    assert int(model[1].steps) == 4  # type: ignore[index]


@pytest.mark.parametrize("strategy", ["mirrored-2", "pipeline-2"])
def test_sparse_gradients_are_added_up_as_dense_ones(strategy: str) -> None:
    model = net(nn.EmbeddingBag(20, 8, sparse=True))
    tokens = torch.randint(0, 20, (40, 5))
    job = lockstep.Job(
        model, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), (tokens, Y), 13
    )
    report = lockstep.verify(job, STRATEGIES[strategy]())
    assert report.passed, report


class CastsItsRouter(nn.Module):
    """Converts a module in its forward, as the Switch Transformer does with its router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        made: Tensor = self.router(x.float()).to(x.dtype)
        return made


@pytest.mark.parametrize("strategy", ["one device", *FEWER])
def test_parameters_that_a_forward_puts_elsewhere(strategy: str) -> None:
    make = {"one device": lockstep.SingleDeviceStrategy, **STRATEGIES}[strategy]
    model = net(CastsItsRouter()).double()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = lockstep.Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, strategy=make(), precision="fp64"
    )
    with pytest.raises(ModelError, match=r"a change of '0.router.weight': it lies in other"):
        trainer.fit((X, Y), batch_size=13)
    for name, value in model.state_dict().items():
        assert value.equal(before[name]), name
