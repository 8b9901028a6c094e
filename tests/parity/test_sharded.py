"""Sharded parameters, gradients and slots: what one device trains, and what a rank keeps.

The parity table has rows for whole trainings. Here: models that use their parameters in unusual
ways, what lies beside the weights, what callbacks see, and what is refused.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import ModelError, NonFiniteLossError, OptionError
from lockstep.parallel.sharding.recomputation import Recomputation
from lockstep.train.optim import slot_windows
from lockstep.train.optim.slot_windows import SlotWindows
from tests.sharding import UnitByUnit
from tests.thorough import core_of

SHARDED = partial(UnitByUnit, 2, engine="gloo")
REPLICAS = partial(lockstep.HybridStrategy, 2, shard=2)
INPUTS = torch.randn(48, 12, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 5, (48,), generator=torch.Generator().manual_seed(2))
ADAM = partial(torch.optim.Adam, lr=1e-2)
WIDTH = 48


def trained(
    make_model: Callable[[], nn.Module], strategy: lockstep.Strategy, **options: Any
) -> dict[str, Tensor]:
    """Weights, buffers and slots after two calls of ``fit``."""
    torch.manual_seed(0)
    batch_size = options.pop("batch_size", 16)
    options = {"precision": "fp64", "optimizer": ADAM, "loss": nn.CrossEntropyLoss(), **options}
    model = make_model()
    trainer = lockstep.Trainer(model, strategy=strategy, seed=3, **options)
    for _ in range(2):
        trainer.fit((INPUTS, TARGETS), batch_size=batch_size, epochs=2, verbose=0)
    slots = trainer.optimizer.state_dict()["state"]
    return {
        **{name: value.clone() for name, value in model.state_dict().items()},
        **{
            f"slot {number} {slot}": torch.as_tensor(value).clone()
            for number, own in slots.items()
            for slot, value in own.items()
        },
    }


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm()
        assert error <= 1e-12 * max(float(value.double().norm()), 1e-3), name


def mlp() -> nn.Module:
    layers = [nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(64, 5))


def matrices() -> nn.Module:
    layers = [nn.Linear(12, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, 5, bias=False))


class Blocks(nn.Module):
    """A first layer, blocks, and a last one."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh() + x
        output: Tensor = self.last(x)
        return output


class Tied(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = self.blocks[0].weight


class Frozen(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight.requires_grad_(False)


class Skips(Blocks):
    """Each share uses the blocks that its samples need: ranks use different ones."""

    def forward(self, x: Tensor) -> Tensor:
        found = x = self.first(x)
        for number, block in enumerate(self.blocks):
            mask = x[:, number : number + 1] > 0.8
            if mask.any():
                found = torch.where(mask, block(found).tanh(), found)
        output: Tensor = self.last(found)
        return output


class SkipsBetweenNorms(Blocks):
    """Ranks skip several blocks, and meet in a BatchNorm before and after them."""

    def __init__(self) -> None:
        super().__init__(6)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = self.norms[0](self.first(x))
        for number in range(2):
            mask = x[:, number : number + 1] > 1.2
            for block in self.blocks[3 * number : 3 * number + 3] if mask.any() else ():
                found = torch.where(mask, block(found).tanh(), found)
            found = self.norms[number + 1](found)
        output: Tensor = self.last(found)
        return output


class Repeats(Blocks):
    """One block several times."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.blocks[0](x).tanh()
        output: Tensor = self.last(x)
        return output


class RepeatsNorms(nn.Module):
    """All its units run again, and stay on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x).tanh()
        return x[:, :5]


class Norms(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64)),
            *(nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 5)),
        )


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 16, 3, padding=1))
        )
        self.last = nn.Linear(192, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.layers(x[:, None]).flatten(1))
        return output


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(4, 32, 2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.layer(x.view(-1, 3, 4))[0][:, -1])
        return output


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(-1, 3, 4))
        for layer in self.layers:
            x = self.run(layer, x)
        output: Tensor = self.last(x[:, 0])
        return output

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = layer(x)
        return output


class Recomputed(Transformer):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(layer, x, use_reentrant=False)
        return output


class RecomputedInBackward(Transformer):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(layer, x, use_reentrant=True)
        return output


class Embedded(Blocks):
    def __init__(self) -> None:
        super().__init__(2)
        self.first = nn.Embedding(100, WIDTH)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first((x * 20).long().clamp(0, 99)).mean(1)
        for block in self.blocks:
            x = block(x).tanh()
        output: Tensor = self.last(x)
        return output


class Parametrised(Blocks):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block)


SGD = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tied": (Tied, {}),
    "frozen": (Frozen, {}),
    "skipped blocks": (Skips, {}),
    "skipped blocks between BatchNorms": (SkipsBetweenNorms, SGD),
    "a block three times": (Repeats, {}),
    "BatchNorms several times": (RepeatsNorms, SGD),
    "BatchNorm": (Norms, SGD),  # biases before it have no gradient but rounding
    "convolutions": (Convolutions, {}),
    "LSTM": (Recurrent, {}),
    "transformer": (Transformer, SGD),  # so have the biases of keys
    "recomputed": (Recomputed, SGD),
    "recomputed in backward": (RecomputedInBackward, SGD),
    "embedding": (Embedded, {}),
    "weight norm": (Parametrised, {}),
}
IN_CORE = ("tied", "skipped blocks", "BatchNorm", "LSTM", "transformer", "recomputed")
WITH_ONE_COPY = ("skipped blocks", "a block three times")
OPTIONS: dict[str, dict[str, Any]] = {
    "clipping": {"clip_norm": 0.1},
    "accumulation": {"accumulate": 3},
    "short batches": {"batch_size": 17},
    "a rank without samples": {"batch_size": 47},
    "Muon": {"optimizer": partial(torch.optim.Muon, lr=1e-2)},  # it takes matrices only
    "averages": {"average": lockstep.EMA(0.9)},
    "unknown reduction": {"loss": lambda output, target: F.cross_entropy(output, target) ** 2},
}


STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "gradients": partial(SHARDED, level="gradients"),
    "parameters": SHARDED,
    "one copy": partial(SHARDED, engine=None),
    "replicas": REPLICAS,
    "gathered once": partial(lockstep.FullyShardedStrategy, 2, engine="gloo"),
    "one copy, gathered once": partial(lockstep.FullyShardedStrategy, 2),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    core_of(
        [(name, strategy) for name in MODELS for strategy in STRATEGIES],
        lambda name, strategy: (
            (strategy == "parameters" and name in IN_CORE)
            or (name, strategy) == ("skipped blocks", "replicas")
            or (name in WITH_ONE_COPY and strategy == "one copy")
        ),
        lambda name, strategy: (
            strategy == "parameters" and name != "skipped blocks between BatchNorms"
        ),
    ),
)
def test_models_are_what_one_device_trains(name: str, strategy: str) -> None:
    make_model, options = MODELS[name]
    expected = trained(make_model, lockstep.SingleDeviceStrategy(), **options)
    check_equal(trained(make_model, STRATEGIES[strategy](), **options), expected)


class NotesMemory(Blocks):
    """Each process writes down in which file's memory the parameters of its model lie."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        place = self.first.weight.data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, _, stop = line.partition(" ")[0].partition("-")
            if int(start, 16) <= place < int(stop, 16):
                (self.folder / str(os.getpid())).write_text(" ".join(line.split()[3:5]))
        return super().forward(x)


@pytest.mark.parametrize(("engine", "copies"), [(None, 1), ("gloo", 2)])
def test_cores_of_one_host_have_one_copy_of_the_parameters(
    engine: str | None, copies: int, tmp_path: Path
) -> None:
    model = partial(NotesMemory, tmp_path)
    trained(model, SHARDED(engine=engine))
    noted = [one.read_text() for one in tmp_path.iterdir()]
    assert len(noted) >= 2
    assert len({*noted}) == copies


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "strategy"),
    core_of(
        [(name, strategy) for name in OPTIONS for strategy in ("parameters", "replicas")],
        lambda name, strategy: (
            (strategy == "parameters" and name != "short batches") or name == "Muon"
        ),
        [],
    ),
)
def test_options_do_what_they_do_on_one_device(name: str, strategy: str) -> None:
    options = OPTIONS[name]
    model = matrices if name == "Muon" else mlp
    expected = trained(model, lockstep.SingleDeviceStrategy(), **options)
    check_equal(trained(model, STRATEGIES[strategy](), **options), expected)


@pytest.mark.exhaustive
def test_ranks_with_several_shares_meet_in_batch_norm() -> None:
    """A rank with one share goes backward alone, and the others layer by layer."""
    options: dict[str, Any] = {"accumulate": 2, "batch_size": 7, **SGD}
    expected = trained(Norms, lockstep.SingleDeviceStrategy(), **options)
    strategy = UnitByUnit(3, level="gradients", timeout_seconds=60)
    check_equal(trained(Norms, strategy, **options), expected)


@pytest.mark.parametrize(
    ("level", "devices", "engine"),
    core_of(
        [
            (level, *how)
            for level in ("slots", "gradients", "parameters")
            for how in ((1, None), (2, None), (4, "gloo"))
        ],
        [("slots", 4, "gloo"), ("gradients", 2, None), ("parameters", 4, "gloo")],
        [("parameters", 1, None), ("parameters", 2, None)],
    ),
)
def test_same_shares_give_the_same_bits(level: str, devices: int, engine: str | None) -> None:
    """Also several shares on a rank, of which each has its gradients."""
    strategy = UnitByUnit(devices, level=level, num_shares=4, engine=engine)
    check_bits(strategy, lockstep.MirroredStrategy(1, num_shares=4))


def check_bits(strategy: lockstep.Strategy, alone: lockstep.Strategy) -> None:
    expected = trained(mlp, alone, precision="fp32")
    found = trained(mlp, strategy, precision="fp32")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["gradients", "parameters"])
@pytest.mark.parametrize(("devices", "engine"), [(2, None), (3, "gloo"), (4, "gloo")])
def test_models_that_are_gathered_once_have_the_same_bits(
    level: str, devices: int, engine: str | None
) -> None:
    strategy = lockstep.FullyShardedStrategy(devices, level=level, num_shares=4, engine=engine)
    check_bits(strategy, lockstep.MirroredStrategy(1, num_shares=4))


@pytest.mark.parametrize(
    ("data", "shard", "level"),
    core_of(
        [
            (2, 2, "slots"),
            (2, 2, "gradients"),
            (2, 2, "parameters"),
            (1, 2, "parameters"),
            (2, 1, "parameters"),
            (1, 1, "parameters"),
        ],
        [(2, 2, "parameters")],
    ),
)
def test_sharded_replicas_give_the_same_bits(data: int, shard: int, level: str) -> None:
    strategy = lockstep.HybridStrategy(data, shard=shard, level=level, num_shares=5)
    check_bits(strategy, lockstep.MirroredStrategy(1, num_shares=5))


@pytest.mark.thorough
def test_slots_are_made_window_by_window_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first step rank 0 has no memory for all new slots, beside their places.

    The optimizer has some of the parameters that get gradients.
    """

    def some(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return ADAM([*parameters][1:])

    expected = trained(mlp, SHARDED(), optimizer=some)
    made: list[bool] = []
    of_new = SlotWindows.of_new

    def noting(pieces: Any, new: Any) -> SlotWindows | None:
        found = of_new(pieces, new)
        made.append(found is not None)
        return found

    monkeypatch.setattr(slot_windows, "_MOST_ELEMENTS", 100)
    monkeypatch.setattr(SlotWindows, "of_new", noting)
    found = trained(mlp, SHARDED(), optimizer=some)
    assert made == [True]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Counts(nn.Module):
    """Passes its input on, and counts the parameters that this rank has now."""

    def __init__(self, watched: nn.ModuleList, most: float) -> None:
        super().__init__()
        self.watched, self.most = (*watched.parameters(),), most

    def forward(self, x: Tensor) -> Tensor:
        if self.training:  # what is away reads as zeros
            here = sum(int(np.count_nonzero(one.detach().numpy())) for one in self.watched)
            every = sum(one.numel() for one in self.watched)
            assert here <= self.most * every, f"{here} of {every} parameters"
        return x


class Counted(Blocks):
    def __init__(self, most: float) -> None:
        super().__init__(8)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))
        self.counts = Counts(self.blocks, most)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(self.counts(x)).tanh() + x
        output: Tensor = self.last(x)
        return output


@pytest.mark.thorough
def test_no_rank_has_all_parameters_not_even_in_the_first_step() -> None:
    trained(partial(Counted, 1 / 2 + 2 / 8), SHARDED())
    trained(partial(Counted, 1 / 2 + 2 / 8), REPLICAS())
    with pytest.raises(AssertionError, match="of 18432 parameters"):
        trained(partial(Counted, 1 / 2), SHARDED())


class Reader(lockstep.Callback):
    """Notes the sum of all weights wherever it is called, and changes one of them once."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def _note(self, *_: Any) -> None:
        self.sums.append(sum(float(one.detach().sum()) for one in self.trainer.model.parameters()))

    on_epoch_begin: Any = _note
    on_epoch_end: Any = _note
    on_train_batch_begin: Any = _note
    on_test_begin: Any = _note
    on_test_batch_end: Any = _note
    on_test_end: Any = _note

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._note()
        if batch == 1:
            with torch.no_grad():
                [*self.trainer.model.parameters()][2].mul_(0.9)


def test_callbacks_see_and_change_whole_weights() -> None:
    seen = []
    for strategy in (lockstep.MirroredStrategy(2), SHARDED()):
        torch.manual_seed(0)
        reader, data = Reader(), (INPUTS, TARGETS)
        trainer = lockstep.Trainer(
            mlp(),
            loss=nn.CrossEntropyLoss(),
            optimizer=ADAM,
            strategy=strategy,
            callbacks=[reader],
        )
        history = trainer.fit(data, batch_size=16, epochs=2, validation_data=data, verbose=0)
        seen.append([*reader.sums, *history.history["val_loss"]])
    assert seen[0] == seen[1]


def test_evaluation_within_training_and_after_it() -> None:
    results = []
    for strategy in (lockstep.SingleDeviceStrategy(), SHARDED()):
        torch.manual_seed(0)
        trainer = lockstep.Trainer(
            mlp(),
            loss=nn.CrossEntropyLoss(),
            optimizer=ADAM,
            strategy=strategy,
            precision="fp64",
        )
        data = INPUTS[:33], TARGETS[:33]  # the last batch leaves a rank without samples
        history = trainer.fit(data, batch_size=16, epochs=2, validation_data=data, verbose=0)
        outputs = trainer.predict(INPUTS, batch_size=5)
        loss = trainer.evaluate(data, batch_size=5)["loss"]
        results.append(torch.tensor([*history.history["val_loss"], loss, *outputs.flatten()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


class UsesAnother(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.blocks[0].weight
        output: Tensor = super().forward(x) + F.linear(x.new_ones(1, WIDTH), weight).sum()
        return output


class UsesAView(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.blocks[2].weight
        turned = weight.t()
        output: Tensor = super().forward(x) + 0 * (x.new_ones(1, WIDTH) @ turned).sum()
        return output


class Backwards(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        output: Tensor = self.last(x)
        return output


class SharesEmbedding(Embedded):
    """Uses its first layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(-x)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [UsesAnother, UsesAView, SharesEmbedding])
def test_units_that_are_used_elsewhere_stay(model: type[nn.Module]) -> None:
    expected = trained(model, lockstep.SingleDeviceStrategy())
    check_equal(trained(model, SHARDED()), expected)


def test_units_are_gathered_in_the_order_of_their_use() -> None:
    expected = trained(Backwards, lockstep.SingleDeviceStrategy())
    check_equal(trained(Backwards, SHARDED()), expected)


class Later(Blocks):
    """Uses another module's weight in later steps only, or its blocks in another order."""

    def __init__(self, has_order: bool) -> None:
        super().__init__()
        self.left, self.has_order = 12, has_order

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left > 0:
            return super().forward(x)
        if self.has_order:
            self.blocks = self.blocks[::-1]
            return super().forward(x)
        weight: Any = self.blocks[0].weight
        output: Tensor = super().forward(x) + F.linear(x.new_ones(1, WIDTH), weight).sum()
        return output


@pytest.mark.thorough
@pytest.mark.parametrize("has_order", [True, False])
def test_another_order_than_in_the_first_step_is_refused(has_order: bool) -> None:
    with pytest.raises(ModelError, match="in another order than in its first step"):
        trained(partial(Later, has_order), SHARDED())


class RecomputedWhole(Blocks):
    """Computes all of its blocks again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


def test_recomputation_of_several_units_is_refused_by_its_name() -> None:
    with pytest.raises(ModelError, match=r"torch\.utils\.checkpoint") as caught:
        trained(RecomputedWhole, SHARDED())
    assert "recompute=True" in str(caught.value)
    trained(RecomputedWhole, SHARDED(level="gradients"))


class Penalised(Blocks):
    """Goes backward within its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        output = super().forward(x)
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            output = output + slope.square().sum(1, keepdim=True)
        return output


def test_backward_within_forward() -> None:
    expected = trained(Penalised, lockstep.SingleDeviceStrategy())
    check_equal(trained(Penalised, SHARDED(level="gradients")), expected)
    with pytest.raises(ModelError, match="in another order than in its first step"):
        trained(Penalised, SHARDED())


class Sloped(Blocks):
    """Adds the slopes of its outputs."""

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda x: super(Sloped, self).forward(x).sum())(x)
        return super().forward(x) + slope.square().sum(1, keepdim=True)


class Pushed(Blocks):
    """Adds how its outputs change with its inputs, by a forward derivative."""

    def forward(self, x: Tensor) -> Tensor:
        output, change = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))  # type: ignore[misc]
        return output + change  # type: ignore[no-any-return]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use, in jvp
@pytest.mark.parametrize("kind", [Sloped, Pushed])
def test_transforms_of_torch_func(kind: type[Blocks]) -> None:
    expected = trained(kind, lockstep.SingleDeviceStrategy())
    check_equal(trained(kind, SHARDED(level="gradients")), expected)
    with pytest.raises(ModelError, match=r"torch\.func"):
        trained(kind, SHARDED())
    if kind is Sloped:
        with pytest.raises(ModelError, match=r"torch\.func.*computed again.*recompute=False"):
            trained(kind, SHARDED(level="gradients", recompute=True))


def test_units_of_the_user() -> None:
    units = [["first", "blocks"], "last"]
    expected = trained(Backwards, lockstep.SingleDeviceStrategy())
    check_equal(trained(Backwards, SHARDED(units=units)), expected)


class Drops(Blocks):
    """Blocks with what a second computation could change: random numbers and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2))
            for _ in range(3)
        )


@pytest.mark.thorough
@pytest.mark.parametrize("level", core_of(["parameters", "gradients", "slots"], ["parameters"]))
def test_recomputed_modules_give_the_same_bits(level: str) -> None:
    expected = trained(Drops, SHARDED(level=level))
    recomputed = trained(Drops, SHARDED(level=level, recompute=["blocks.0", "blocks.2"]))
    for name, value in expected.items():
        assert torch.equal(recomputed[name], value), name


def test_recomputed_modules_keep_less() -> None:
    def kept_bytes(names: list[str]) -> int:
        model, sizes = Drops(), []
        saved = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.nbytes), lambda nothing: INPUTS
        )
        with saved, Recomputation(model, names).applied():
            model(INPUTS)
        return sum(sizes)

    assert kept_bytes(["blocks.0", "blocks.2"]) < kept_bytes(["blocks.0"]) < kept_bytes([])


class Debugged(nn.Linear):
    """Takes an argument with the name of an option of ``torch.utils.checkpoint``."""

    def forward(self, x: Tensor, *, debug: bool = False) -> Tensor:
        return super().forward(-x if debug else x)


class Encloses(nn.Module):
    """Is a unit around others, since it has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH, WIDTH) / 10)
        self.blocks = nn.ModuleList(Debugged(WIDTH, WIDTH) for _ in range(2))
        nn.utils.parametrizations.weight_norm(self.blocks[1])

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.position
        for block in self.blocks:
            x = block(x, debug=True).tanh()
        return x


class Enclosed(Backwards):
    """Has units within another, and a layer whose weight is another unit's output."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = Encloses()
        nn.utils.parametrizations.weight_norm(self.first)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        output: Tensor = self.last(self.middle(x))
        return output


@pytest.mark.thorough
def test_recomputed_units_train_as_one_device() -> None:
    expected = trained(Enclosed, lockstep.SingleDeviceStrategy())
    check_equal(trained(Enclosed, SHARDED(recompute=True)), expected)


def test_two_backward_passes_recompute_the_same_forward_pass() -> None:
    model, inputs = Drops(), INPUTS.clone().requires_grad_()
    with Recomputation(model, ["blocks.0"]).applied():
        output = model(inputs)
    first = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    second = torch.autograd.grad(output.sum(), inputs)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SHARDED(level="all"), "level='all'"),
        (lambda: SHARDED(recompute="blocks"), "recompute='blocks'"),
        (lambda: SHARDED(recompute=["blocks", "blocks.0"]), "none of them within another"),
        (lambda: trained(mlp, SHARDED(recompute=["head"])), "recompute with head"),
        (
            lambda: trained(mlp, SHARDED(recompute=True), compile=True),
            "compile=True with recompute",
        ),
        (lambda: SHARDED(units="blocks"), "units='blocks'"),
        (lambda: SHARDED(units=["a", ["a", "b"]]), "Name each module once"),
        (lambda: trained(mlp, SHARDED(units=["head"])), "units with head"),
        (lambda: trained(mlp, SHARDED(level="slots", units=["head"])), "units with head"),
        (lambda: trained(Norms, SHARDED(num_shares=4)), "one share per device"),
        (lambda: REPLICAS(level="all"), "level='all'"),
        (lambda: REPLICAS(pipe=2), "divide the optimizer's slots only"),
        (lambda: lockstep.HybridStrategy((1, 2), shard=2), "`data` must be a number of replicas"),
        (lambda: lockstep.HybridStrategy(2, shard=0), "shard=0"),
        (
            lambda: lockstep.HybridStrategy(2, 2, units=["a"]),
            "`level` needs `shard`, `units` needs it without stages",
        ),
        (
            lambda: trained(mlp, REPLICAS(devices=["cpu"] * 3, engine="gloo")),
            "data=2 and shard=2 with 3 devices",
        ),
    ],
)
def test_what_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


class Assigns(Blocks):
    """Gives a parameter other memory in a later step."""

    num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += self.training
        if self.num_passes == 6:
            weight: Any = self.blocks[1].weight
            weight.data = torch.full_like(weight, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("strategy", [lockstep.MirroredStrategy(2), SHARDED()])
def test_a_parameter_that_a_pass_assigns_is_an_error(strategy: lockstep.Strategy) -> None:
    """Its updates go to the memory that it had."""
    with pytest.raises(ModelError, match=r"other memory.*'?blocks\.1\.weight"):
        trained(Assigns, strategy)


class Reshapes(lockstep.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        next(self.trainer.model.parameters()).data = torch.ones(3, 3)


def test_a_callback_cannot_assign_another_shape() -> None:
    with pytest.raises(ModelError, match=r"'0\.weight' of shape \(3, 3\), before \(64, 12\)"):
        trained(mlp, SHARDED(), callbacks=[Reshapes()])


def test_a_loss_that_is_not_finite_leaves_whole_weights() -> None:
    inputs = INPUTS.clone()
    inputs[40] = torch.nan
    found = []
    for strategy in (lockstep.MirroredStrategy(2), SHARDED()):
        torch.manual_seed(0)
        model = mlp()
        trainer = lockstep.Trainer(
            model, loss=nn.CrossEntropyLoss(), optimizer=ADAM, strategy=strategy
        )
        with pytest.raises(NonFiniteLossError, match="The weights are those before this step"):
            trainer.fit((inputs, TARGETS), batch_size=16, shuffle=False, verbose=0)
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_failure_leaves_no_zeros(tmp_path: Path) -> None:
    """Other ranks' parts of the weights are lost with them, and are not taken for weights."""

    class Fails(Blocks):
        left = 12

        def forward(self, x: Tensor) -> Tensor:
            self.left -= 1
            assert self.left
            return super().forward(x)

    model = Fails()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    trainer = lockstep.Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=ADAM, strategy=SHARDED(), precision="fp64"
    )
    with pytest.raises(AssertionError) as raised:
        trainer.fit((INPUTS, TARGETS), batch_size=16, epochs=4, verbose=0)
    assert "NaN here" in str(raised.value.__notes__)
    weight: Any = model.blocks[1].weight
    assert 0.4 < float(weight.isnan().double().mean()) < 0.6
    assert not (weight == 0).any()
    # Nothing uses them, until they are set again.
    for use in (
        lambda: trainer.evaluate((INPUTS, TARGETS)),
        trainer.state_dict,
        lambda: trainer.save(tmp_path / "weights"),
    ):
        with pytest.raises(ModelError, match=r"weights were lost.*blocks\.1\.weight"):
            use()
    model.load_state_dict(before)
    model.left = 99
    assert trainer.evaluate((INPUTS, TARGETS))["loss"] > 0
