"""Models that ``compile=True`` compiles, whole and in stages: as in loops that compile nothing."""

import copy
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._inductor import config as inductor_config

import lockstep
from lockstep.errors import OptionError
from tests.parity.loop_processes import SCRIPT, assert_exact, run_as_torchrun
from tests.zoo import case


@pytest.fixture
def quick_compilation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch compiles no programs to find out what the processor can, and starts no processes."""
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # helpers get these
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with (
        warnings.catch_warnings(),
        inductor_config.patch({"cpp.vec_isa_ok": True, "compile_threads": 1}),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, in what it imports
        # torch hides this one itself, but not from those who make errors of warnings.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


# Compilation takes its time, above all where other tests have the cores.
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["cnn_batch_norm"])
def test_a_compiled_model_trains_the_same(name: str) -> None:
    one = case(name)
    found = []
    for compiled in (False, True):
        trainer = lockstep.Trainer(
            one.make_model(),
            loss=one.loss,
            optimizer=one.optimizer,
            strategy=lockstep.MirroredStrategy(2),
            precision="fp64",
            compile=compiled,
        )
        trainer.fit((one.inputs, one.targets), batch_size=one.batch_size, shuffle=False, verbose=0)
        found.append({key: value.clone() for key, value in trainer.model.state_dict().items()})
    assert ", compiled" in str(trainer.plan)
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-12, atol=1e-13)


class _CompileCounter(lockstep.Callback):
    """How often this process has compiled something, at the end of each epoch."""

    def __init__(self) -> None:
        self.count = 0
        self.counts: list[int] = []

    def note(self, *details: object) -> None:
        self.count += 1

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.counts.append(self.count)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_compilation")
def test_nothing_is_compiled_again_after_the_first_epoch() -> None:
    """With a short last batch, shares and validation of other sizes, and in a second fit."""
    counter = _CompileCounter()
    callback_handler.register_start_callback(counter.note)
    try:
        trainer = lockstep.Trainer(
            nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-3),
            strategy=lockstep.MirroredStrategy(2, num_shares=4),
            callbacks=[counter],
            compile=True,
        )
        x, y = torch.randn(100, 16), torch.arange(100) % 3
        for _ in range(2):
            held_out = (x[:37], y[:37])
            trainer.fit((x, y), batch_size=16, epochs=2, validation_data=held_out, verbose=0)
    finally:
        callback_handler.remove_start_callback(counter.note)
    assert counter.counts[0] > 0
    assert counter.counts == [counter.counts[0]] * 4


class Doubling(nn.Module):
    """Makes something else where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(inputs)
        return 2 * result if torch.compiler.is_compiling() else result


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_compilation")
def test_all_ranks_run_what_is_compiled() -> None:
    torch.manual_seed(0)
    model, x, y = Doubling().double(), torch.randn(24, 4).double(), torch.arange(24) % 3
    plain = copy.deepcopy(model)
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.MirroredStrategy(2),
        precision="fp64",
        compile=True,
    )
    trainer.fit((x, y), batch_size=8, epochs=2, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in torch.arange(24).split(8) * 2:
        optimizer.zero_grad()
        F.cross_entropy(2 * plain(x[rows]), y[rows]).backward()
        optimizer.step()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-12, atol=1e-13)


class Skipping(nn.Module):
    """With a value that a stage sends and uses, and operations that a compiler fuses."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        first = self.dropout(torch.tanh(self.first(x)))
        second = self.dropout(torch.sigmoid(self.second(first)) * first)
        output: Tensor = self.last(second)
        return output


class CountingLoss(nn.Module):
    """Writes at each call how often its process has compiled something since the first."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if not _compiled:
            _compiled.append(0)
            callback_handler.register_start_callback(_note)
        if torch.is_grad_enabled():
            with self._path.open("a") as file:
                file.write(f"{os.getpid()} {_compiled[0]}\n")
        return F.cross_entropy(output, target)


_compiled: list[int] = []


def _note(*details: object) -> None:
    _compiled[0] += 1


X = torch.randn(41, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
Y = torch.arange(41) % 3

STAGES = {
    "1f1b": lockstep.PipelineStrategy(cuts=["second"], microbatches=3),
    "zb-h1": lockstep.PipelineStrategy(3, microbatches=2, schedule="zb-h1"),
    "again": lockstep.PipelineStrategy(2, microbatches=2, recompute=True),
    "replicas over gloo": lockstep.HybridStrategy(2, 2, microbatches=1, engine="gloo"),
}


def in_stages(strategy: Any, model: nn.Module, loss: Any, **options: Any) -> lockstep.Trainer:
    trainer = lockstep.Trainer(
        model,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        strategy=strategy,
        precision="fp64",
        **{"compile": True, **options},
    )
    held_out = (X[:7], Y[:7])
    trainer.fit((X, Y), batch_size=16, epochs=3, shuffle=False, validation_data=held_out, verbose=0)
    return trainer


def plain_loop(model: nn.Module) -> float:
    """Train like ``in_stages``; returns the loss of the samples held out."""
    optimizer = torch.optim.SGD(model.double().parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for x, y in zip(X.split(16), Y.split(16), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(X[:7]), Y[:7]).item()


@pytest.mark.exhaustive  # 40 s; test_compiled_stages.py has it without inductor
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", STAGES)
def test_compiled_stages_train_as_a_plain_loop(name: str, tmp_path: Path) -> None:
    """With microbatches of several sizes; nothing is compiled after the first epoch."""
    torch.manual_seed(0)
    model, plain = Skipping(), Skipping()
    plain.load_state_dict(model.state_dict())
    loss = plain_loop(plain)
    counter = _CompileCounter()
    callback_handler.register_start_callback(counter.note)
    try:
        loss_function = CountingLoss(tmp_path / "counts")
        trainer = in_stages(STAGES[name], model, loss_function, callbacks=[counter])
    finally:
        callback_handler.remove_start_callback(counter.note)
    assert ", compiled" in str(trainer.plan)
    for key, value in plain.state_dict().items():
        assert (trainer.model.state_dict()[key] - value).norm() <= 1e-12 * value.norm(), key
    assert trainer.evaluate((X[:7], Y[:7]))["loss"] == pytest.approx(loss, rel=1e-12)
    helpers: dict[str, list[int]] = {}
    for line in (tmp_path / "counts").read_text().splitlines():
        process, count = line.split()
        helpers.setdefault(process, []).append(int(count))
    del helpers[str(os.getpid())]  # the loss runs there before training only
    for found in (counter.counts, *helpers.values()):
        later = found[len(found) // 2 :]  # from the middle of the second epoch
        assert later[0] > 0
        assert later == later[:1] * len(later)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("strategy", [STAGES["1f1b"], lockstep.MirroredStrategy(2)], ids=str)
def test_compiled_code_draws_the_same_numbers(strategy: lockstep.Strategy) -> None:
    torch.manual_seed(0)
    models = [Skipping(0.3), Skipping(0.3)]
    models[1].load_state_dict(models[0].state_dict())
    for model, is_compiled in zip(models, (False, True), strict=True):
        in_stages(strategy, model, nn.CrossEntropyLoss(), compile=is_compiled)
    for key, value in models[0].state_dict().items():
        assert (models[1].state_dict()[key] - value).norm() <= 1e-12 * value.norm(), key


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("engine", ["shared", "gloo"])
def test_a_loop_of_ones_own_may_compile_its_model(engine: str) -> None:
    loops = ["mlp, compiled"]
    assert_exact(run_as_torchrun([SCRIPT, engine, *loops], 2), loops)


def test_compile_is_a_choice() -> None:
    with pytest.raises(OptionError, match="`compile` must be True or False"):
        lockstep.Trainer(nn.Linear(2, 2), compile="max")  # type: ignore[arg-type]
