"""A model made by a function is the same model under every strategy."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lockstep
from lockstep.errors import ModelError, OptionError

pytestmark = pytest.mark.thorough


class Tied(nn.Module):
    """Dropout, a tied weight, a buffer that is computed, a layer with an own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 32)
        self.middle = nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 32), nn.Dropout(0.1)
        )
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32))
        self.head = nn.Linear(32, 23)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embedding(tokens)) * self.scale)
        return logits.transpose(1, 2)


TOKENS = torch.randint(23, (50, 6), generator=torch.Generator().manual_seed(1))
DATA = TOKENS, TOKENS.roll(1, 1)


def train(strategy: lockstep.Strategy, path: Path) -> dict[str, Tensor]:
    trainer = lockstep.Trainer(
        lambda: Tied(),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        strategy=strategy,
        precision="fp64",
    )
    trainer.fit(DATA, epochs=1, batch_size=16, verbose=0)
    trainer.fit(DATA, epochs=1, batch_size=16, verbose=0)
    trainer.save(path)
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return train(lockstep.SingleDeviceStrategy(), tmp_path_factory.mktemp("alone") / "weights")


@pytest.mark.parametrize(
    "strategy",
    [
        lockstep.MirroredStrategy(1),
        lockstep.PipelineStrategy(2, microbatches=1),
        lockstep.PipelineStrategy(3, None, 1, "zb-h1"),
        pytest.param(
            lockstep.HybridStrategy(pipe=2, tensor=2, microbatches=1), marks=pytest.mark.thorough
        ),
    ],
    ids=["mirrored", "2 stages", "3 stages", "2 divided stages"],
)
def test_the_same_weights_in_the_model_and_in_the_file(
    strategy: lockstep.Strategy, alone: dict[str, Tensor], tmp_path: Path
) -> None:
    weights = train(strategy, tmp_path / "weights")
    saved = load_file(tmp_path / "weights")
    for name, value in alone.items():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-13), name
        assert saved.get(name, value).equal(weights[name]) or name == "head.weight"


@pytest.mark.parametrize(
    ("level", "engine"), [("parameters", "gloo"), ("gradients", "gloo"), ("parameters", None)]
)
def test_ranks_that_divide_parameters_make_their_parts(
    level: str, engine: str | None, tmp_path: Path
) -> None:
    expected = train(lockstep.MirroredStrategy(1, num_shares=2), tmp_path / "expected")
    strategy = lockstep.FullyShardedStrategy(2, level=level, engine=engine)
    weights = train(strategy, tmp_path / "weights")
    assert all(weights[name].equal(value) for name, value in expected.items())
    saved = load_file(tmp_path / "weights")
    assert all(weights[name].equal(value) for name, value in saved.items())


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))


def resident_part(model: nn.Module) -> float:
    """Of the memory in which the parameters lie, the part whose pages this process has."""
    return resident_part_around(next(model.parameters()))


def resident_part_around(tensor: Tensor) -> float:
    place, wanted = tensor.data_ptr(), ""
    found: dict[str, int] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        start, _, stop = line.partition(" ")[0].partition("-")
        if stop:
            wanted = "here" if int(start, 16) <= place < int(stop, 16) else ""
        elif wanted and line.startswith(("Size:", "Rss:")):
            name, size, _ = line.split()
            found[name] = int(size)
    return found["Rss:"] / found["Size:"]


def test_no_process_has_all_of_a_divided_model_that_a_function_makes(tmp_path: Path) -> None:
    make = partial(
        lockstep.Trainer, wide, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    trainer = make(strategy=lockstep.FullyShardedStrategy(2, engine="gloo"))
    inputs = torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        trainer.fit((inputs, inputs), batch_size=8, verbose=0)
        assert 0.4 < resident_part(trainer.model) < 0.6
    trainer.save(tmp_path / "weights")
    assert resident_part(trainer.model) < 0.2
    alone = make(strategy=lockstep.FullyShardedStrategy(1, num_shares=2))
    for _ in range(2):
        alone.fit((inputs, inputs), batch_size=8, verbose=0)
    saved = load_file(tmp_path / "weights")
    assert all(saved[name].equal(value) for name, value in alone.model.state_dict().items())
    alone.save(tmp_path / "others")
    trainer.load(tmp_path / "others")
    assert resident_part(trainer.model) < 0.2
    trainer.fit((inputs, inputs), batch_size=8, verbose=0)
    alone.fit((inputs, inputs), batch_size=8, verbose=0)
    for one, other in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.exhaustive
def test_the_script_has_no_pages_of_the_one_copy_when_others_have_left_it() -> None:
    trainer = lockstep.Trainer(
        wide(),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        strategy=lockstep.FullyShardedStrategy(2),
    )
    inputs = torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        trainer.fit((inputs, inputs), batch_size=8, verbose=0)
        assert resident_part(trainer.model) < 0.1
        slots = next(iter(trainer.optimizer.state.values()))
        assert resident_part_around(slots["exp_avg"]) < 0.1
    before = [one.clone() for one in trainer.model.parameters()]
    assert resident_part(trainer.model) == 1
    trainer.fit((inputs, inputs), batch_size=8, verbose=0)
    assert not any(
        one.equal(other) for one, other in zip(before, trainer.model.parameters(), strict=True)
    )


def test_first_values_depend_on_the_seed_and_not_on_the_global_stream() -> None:
    def first(seed: int) -> Tensor:
        trainer = lockstep.Trainer(lambda: nn.Linear(4, 3), seed=seed)
        trainer.predict(torch.randn(2, 4))
        value: Tensor = trainer.model.state_dict()["weight"].clone()
        return value

    one = first(1)
    torch.manual_seed(7)
    assert one.equal(first(1))
    assert not one.equal(first(2))


def test_a_function_that_makes_no_model_is_refused() -> None:
    with pytest.raises(OptionError, match="must return a torch"):
        lockstep.Trainer(lambda: 3)  # type: ignore[arg-type, return-value]


class Helpless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_a_module_that_cannot_be_given_values_is_named() -> None:
    with pytest.raises(ModelError, match="0, 2"):
        lockstep.Trainer(lambda: nn.Sequential(Helpless(), nn.Linear(3, 3), Helpless()))
