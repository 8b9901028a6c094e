"""Models in forms that users have them in: with sparse buffers, compiled, on the meta device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lockstep
from lockstep.callbacks import LambdaCallback
from lockstep.errors import ModelError

pytestmark = pytest.mark.thorough

X = torch.randn(22, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(22, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
BATCH = 8


class Graph(nn.Module):
    """Mixes its features along a sparse matrix."""

    mixing: Tensor

    def __init__(self, *, drifts: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)
        self.register_buffer("mixing", (torch.eye(6) + torch.eye(6).roll(1, 0)).to_sparse())
        self.drifts = drifts

    def forward(self, inputs: Tensor) -> Tensor:
        if self.drifts:
            self.mixing = self.mixing * 1.5
        hidden = torch.sparse.mm(self.mixing, self.first(inputs).tanh().T).T
        result: Tensor = self.last(hidden)
        return result


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def compiled(model: nn.Module) -> nn.Module:
    found: Any = torch.compile(model, backend="eager")
    assert isinstance(found, nn.Module)
    return found


def partly_compiled() -> nn.Module:
    model = nn.Sequential(layers(), nn.Tanh(), compiled(nn.Linear(4, 4)))
    model[0].compile(backend="eager")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sparse buffer": Graph,
    "compiled": lambda: compiled(layers()),
    "compiled in part": partly_compiled,
}
STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "mirrored 2": lambda: lockstep.MirroredStrategy(2),
    "pipeline 2": lambda: lockstep.PipelineStrategy(2, microbatches=2),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


# torch hides this one itself, but not from those who make errors of warnings.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_weights_of_a_plain_loop(name: str, strategy: str) -> None:
    plain = seeded(MODELS[name])
    optimizer = sgd(plain.parameters())
    for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
    model = seeded(MODELS[name])
    names = list(model.state_dict())
    trainer = lockstep.Trainer(
        model, loss=F.mse_loss, optimizer=sgd, strategy=STRATEGIES[strategy](), precision="fp64"
    )
    trainer.fit((X, Y), batch_size=BATCH, shuffle=False, verbose=0)
    for key, wanted in plain.named_parameters():
        assert (dict(model.named_parameters())[key] - wanted).norm() < 1e-12, key
    assert list(model.state_dict()) == names


class Telling(nn.Module):
    """Makes something else where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(inputs) * self.scale
        return 3 * result if torch.compiler.is_compiling() else result


def compiled_in_itself(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_with_parametrizations(model: nn.Module) -> nn.Module:
    return compiled_in_itself(parametrize.register_parametrization(model, "scale", nn.Identity()))


# torch hides this one itself, but not from those who make errors of warnings.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "compile_model",
    [compiled, compiled_in_itself, compiled_with_parametrizations],
    ids=["by torch.compile", "in itself", "with parametrizations"],
)
def test_what_is_compiled_runs_so_on_every_rank_and_at_every_step(
    compile_model: Callable[[nn.Module], nn.Module],
) -> None:
    plain = seeded(Telling)
    losses: list[float] = []
    note = LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    trainer = lockstep.Trainer(
        compile_model(seeded(Telling)),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        strategy=lockstep.MirroredStrategy(2),
        precision="fp64",
        callbacks=[note],
    )
    trainer.fit((X, Y), batch_size=BATCH, shuffle=False, verbose=0)
    wanted = [
        F.mse_loss(3 * plain(x), y).item()
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True)
    ]
    assert losses == pytest.approx(wanted, rel=1e-12)


def test_sparse_buffers_are_constants() -> None:
    trainer = lockstep.Trainer(
        seeded(lambda: Graph(drifts=True)),
        loss=F.mse_loss,
        optimizer=sgd,
        strategy=lockstep.SingleDeviceStrategy(),
        precision="fp64",
    )
    with pytest.raises(ModelError, match=r"sparse buffer must stay constant.*'mixing'"):
        trainer.fit((X, Y), batch_size=BATCH, verbose=0)
    assert "mixing" in trainer.model.state_dict()


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = layers()
        normalized = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    given = lockstep.Trainer(model, strategy=lockstep.SingleDeviceStrategy())
    made = lockstep.Trainer(lambda: layers(), strategy=lockstep.SingleDeviceStrategy())
    assert given.predict(X.float()).equal(made.predict(X.float()))
    assert not any(one.is_meta for one in model.parameters())
    with pytest.raises(ModelError, match=r"no buffers.*1\.running_mean.*lambda"):
        lockstep.Trainer(normalized)


class Shifted(nn.Module):
    """A layer that leaves its values to the model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4))


class Around(nn.Module):
    """Gives first values as transformers' models do."""

    def __init__(self, *, knows: bool = True) -> None:
        super().__init__()
        self.inner, self.last, self.knows = Shifted(), nn.Linear(4, 4), knows

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Shifted) and self.knows:
            nn.init.constant_(module.weight, 0.25)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(inputs @ self.inner.weight)
        return result


def test_first_values_by_the_model_around() -> None:
    trainer = lockstep.Trainer(lambda: Around(), strategy=lockstep.SingleDeviceStrategy())
    trainer.predict(X.float())
    values = dict(trainer.model.named_parameters())
    assert (values["inner.weight"] == 0.25).all()
    assert not values["last.bias"].any()
    assert values["last.weight"].std() > 0
    trainer = lockstep.Trainer(lambda: Around(knows=False))
    with pytest.raises(ModelError, match=r"no values for inner\.weight"):
        trainer.predict(X.float())
