"""Pipelines as users run them: evaluation, prediction, callbacks, memory, failures."""

import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import LockstepError, OptionError
from lockstep.parallel.pipeline.microbatch_run import MicrobatchRun
from tests.thorough import core_of
from tests.zoo import case

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(3))
Y = (X.sum(1) > 0).long() + (X[:, 0] > 0).long()


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        )


def make_trainer(strategy: lockstep.Strategy, model: nn.Module | None = None, **more: Any) -> Any:
    options = {"optimizer": partial(torch.optim.Adam, lr=1e-2), "precision": "fp64", **more}
    return lockstep.Trainer(
        model or make_model(), loss=nn.CrossEntropyLoss(), strategy=strategy, **options
    )


STRATEGIES = {
    "2": lockstep.PipelineStrategy(2, microbatches=3),
    "3-zb-h1": lockstep.PipelineStrategy(3, None, 4, "zb-h1"),
    "2x2": lockstep.HybridStrategy(2, 2, microbatches=2),
    "3-1": lockstep.HybridStrategy((3, 1), microbatches=2),
}


@pytest.fixture(params=core_of(STRATEGIES, ["3-zb-h1", "2x2"]))
def strategy(request: pytest.FixtureRequest) -> lockstep.Strategy:
    return STRATEGIES[request.param]


def test_fit_evaluate_and_predict_are_those_of_one_device(strategy: lockstep.Strategy) -> None:
    ours, alone = make_trainer(strategy), make_trainer(lockstep.SingleDeviceStrategy())
    for _ in range(2):
        found = ours.fit(
            (X, Y), epochs=2, batch_size=16, validation_data=(X[:21], Y[:21]), verbose=0
        )
        wanted = alone.fit(
            (X, Y), epochs=2, batch_size=16, validation_data=(X[:21], Y[:21]), verbose=0
        )
        assert found.history["loss"] == pytest.approx(wanted.history["loss"], rel=1e-12)
        assert found.history["val_loss"] == pytest.approx(wanted.history["val_loss"], rel=1e-12)
    assert ours.evaluate((X, Y), batch_size=13)["loss"] == pytest.approx(
        alone.evaluate((X, Y), batch_size=13)["loss"], rel=1e-12
    )
    for size in (1, 7, 50):
        assert ours.predict(X, batch_size=size).allclose(alone.predict(X), rtol=0, atol=1e-12)
    assert ours.predict(X[:0]).shape == (0, 3)


def test_weights_and_slots_go_from_one_strategy_to_the_next() -> None:
    alone = make_trainer(lockstep.SingleDeviceStrategy())
    alone.fit((X, Y), epochs=3, batch_size=16, verbose=0)
    model = make_model().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    strategies = (
        lockstep.PipelineStrategy(3, microbatches=2),
        lockstep.MirroredStrategy(2),
        lockstep.PipelineStrategy(2, microbatches=4),
    )
    for epoch, each in enumerate(strategies):
        trainer = make_trainer(each, model, optimizer=optimizer)
        trainer._runner.epochs_trained = epoch  # the order of the samples goes on
        trainer.fit((X, Y), epochs=1, batch_size=16, verbose=0)
    for name, value in alone.model.state_dict().items():
        assert model.state_dict()[name].allclose(value, rtol=0, atol=1e-12), name


class Probe(nn.Module):
    """Notes per process how many microbatches are between forward and backward, and the memory."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not self.training:
            return x
        probed: Tensor = _Count.apply(x, self.path)  # type: ignore[no-untyped-call]
        return probed


_kept: dict[Path, int] = {}


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, path: Path) -> Tensor:
        ctx.path = path
        _kept[path] = _kept.get(path, 0) + 1
        with path.open("a") as file:
            record = {"pid": os.getpid(), "kept": _kept[path], "bytes": shared_bytes()}
            file.write(json.dumps(record) + "\n")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _kept[ctx.path] -= 1
        return gradient, None


def shared_bytes() -> int:
    """Resident bytes of this process in anonymous shared memory."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            is_ours = "memfd:lockstep" in line
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def records(path: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        pytest.param("gpipe", [6, 6, 6], marks=pytest.mark.exhaustive),
        ("1f1b", [3, 2, 1]),
        pytest.param("zb-h1", [3, 2, 1], marks=pytest.mark.exhaustive),
    ],
)
def test_activations_are_kept_as_the_schedule_says(
    schedule: str, wanted: list[int], tmp_path: Path
) -> None:
    parts = [
        nn.Sequential(nn.Linear(6, 6), Probe(tmp_path / str(stage)), nn.Tanh())
        for stage in range(3)
    ]
    strategy = lockstep.PipelineStrategy(cuts=["1", "2"], microbatches=6, schedule=schedule)
    trainer = make_trainer(strategy, nn.Sequential(*parts))
    clear(tmp_path)
    trainer.fit((X, Y), batch_size=25, verbose=0)
    own = [after_tracing(tmp_path / str(stage)) for stage in range(3)]
    assert [max(record["kept"] for record in found) for found in own] == wanted


def clear(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def after_tracing(path: Path) -> list[dict[str, int]]:
    """What was noted in training: the process that trains the stage notes last."""
    found = records(path)
    pid = found[-1]["pid"]
    mine = [record for record in found if record["pid"] == pid][-12:]
    before = mine[0]["kept"] - 1  # by what has traced the model, without going backward
    return [{**record, "kept": record["kept"] - before} for record in mine]


@pytest.mark.thorough
def test_each_process_keeps_the_parameters_of_its_stage_only(tmp_path: Path) -> None:
    gc.collect()
    before = {os.getpid(): shared_bytes()}  # what earlier tests have left here
    width = 1024  # 4 MiB a layer
    parts = [
        nn.Sequential(nn.Linear(width, width, bias=False), Probe(tmp_path / str(stage)))
        for stage in range(3)
    ]
    parts[1].append(nn.Linear(width, width, bias=False))
    model = nn.Sequential(*parts)
    trainer = make_trainer(
        lockstep.PipelineStrategy(cuts=["1", "2"], microbatches=2),
        model,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        precision="fp32",
    )
    trainer.fit((torch.randn(8, width), torch.zeros(8, dtype=torch.long)), batch_size=4, verbose=0)
    for stage, num_layers in enumerate((1, 2, 1)):
        record = records(tmp_path / str(stage))[-1]
        found = record["bytes"] - before.get(record["pid"], 0)
        own = num_layers * 4 * width * width
        assert own <= found + 4 * width * width * (stage == 1), stage  # its second comes later
        assert found < own + (1 << 20), stage
    assert len({records(tmp_path / str(stage))[-1]["pid"] for stage in range(3)}) == 3


class Note(lockstep.Callback):
    """Changes the learning rate, and looks at weights and buffers."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        assert self.trainer.optimizer is not None
        for group in self.trainer.optimizer.param_groups:
            group["lr"] *= 0.9


def test_what_callbacks_change_reaches_every_stage() -> None:
    one, other = Note(), Note()
    ours = make_trainer(lockstep.PipelineStrategy(3, microbatches=2), callbacks=[one])
    alone = make_trainer(lockstep.SingleDeviceStrategy(), callbacks=[other])
    for trainer in (ours, alone):
        trainer.fit((X, Y), epochs=2, batch_size=16, verbose=0)
    assert one.losses == pytest.approx(other.losses, rel=1e-12)


def test_buffers_come_back_from_the_stages() -> None:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )
    trainer = make_trainer(lockstep.PipelineStrategy(cuts=["2"], microbatches=1), model)
    trainer.fit((X, Y), epochs=2, batch_size=25, verbose=0)
    assert int(model[3].num_batches_tracked) == 4  # type: ignore[arg-type]
    assert trainer.predict(X).allclose(model.eval()(X.double()), rtol=0, atol=1e-12)


class Failing(nn.Module):
    """Fails on a sample that says so."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and bool((x.abs() > 1e6).any()):
            raise ValueError("as asked")
        return x


def test_a_failure_in_a_stage_is_one_error_with_its_rank() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3), Failing())
    trainer = make_trainer(lockstep.PipelineStrategy(cuts=["1"], microbatches=2), model)
    bad = X.clone()
    bad[47] = 1e12
    with pytest.raises(ValueError, match=r"Rank 1 failed \(in fit, step 3\).*as asked"):
        trainer.fit((bad, Y), batch_size=15, shuffle=False, verbose=0)
    assert trainer.fit((X, Y), batch_size=10, verbose=0).history["loss"]


class ByNumber(nn.Module):
    """Does something else with so many samples than with others."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == self.number else x


def test_what_is_decided_by_sizes_otherwise_than_before_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(6, 8), ByNumber(4), nn.Linear(8, 3))
    trainer = make_trainer(lockstep.PipelineStrategy(cuts=["2"], microbatches=2), model)
    with pytest.raises(LockstepError, match=r"eq\(4, 4\), first False"):
        trainer.fit((X, Y), batch_size=14, shuffle=False, verbose=0)


@pytest.mark.parametrize("number", [2, 5])
def test_what_is_decided_by_a_size_that_is_traced_is_decided_anew(number: int) -> None:
    """Models are traced with 2 and with 5 samples: where they differ, a module is called whole."""
    model = nn.Sequential(nn.Linear(6, 8), ByNumber(number), nn.Linear(8, 3))
    trainer = make_trainer(lockstep.PipelineStrategy(cuts=["2"], microbatches=2), model)
    plan = trainer.plan_for((X, Y), batch_size=12)
    assert "what it does depends on the number of samples" in "".join(plan.notes)


class Kill(lockstep.Callback):
    """Kills a helper in the second step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            trainer: Any = self.trainer
            os.kill(trainer._runner.session._team.pids()[0], signal.SIGKILL)


def test_a_killed_stage_is_an_error_and_the_next_fit_works() -> None:
    trainer = make_trainer(lockstep.PipelineStrategy(3, microbatches=2), callbacks=[Kill()])
    with pytest.raises(LockstepError, match="Rank 1"):
        trainer.fit((X, Y), epochs=50, batch_size=16, verbose=0)
    trainer.callbacks = []
    assert trainer.fit((X, Y), batch_size=16, verbose=0).history["loss"]


class Own(torch.optim.SGD):
    """Not torch's own."""


def test_an_optimizer_of_ones_own_is_refused() -> None:
    trainer = make_trainer(
        lockstep.PipelineStrategy(2, microbatches=2), optimizer=partial(Own, lr=0.1)
    )
    with pytest.raises(OptionError, match="Own"):
        trainer.fit((X, Y), verbose=0)


def test_mixed_precision_learns() -> None:
    trainer = make_trainer(lockstep.PipelineStrategy(2, microbatches=2), precision="bf16-mixed")
    history = trainer.fit((X, Y), epochs=20, batch_size=25, verbose=0).history["loss"]
    assert history[-1] < 0.7 * history[0]


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


def test_a_model_of_the_zoo_predicts_the_same() -> None:
    job = case("gpt_tied")
    ours = lockstep.Trainer(job.make_model(), strategy=lockstep.PipelineStrategy(3))
    alone = lockstep.Trainer(job.make_model())
    assert ours.predict(job.inputs).allclose(alone.predict(job.inputs), rtol=1e-4, atol=1e-5)


def images_to_classes() -> nn.Sequential:
    torch.manual_seed(9)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 3),
    )


class Viewing(nn.Module):
    """Reads an image as rows of pixels, which its channels must not lie between."""

    def forward(self, images: Tensor) -> Tensor:
        return images.view(len(images), -1)


@pytest.mark.parametrize("refuses", [False, True])
def test_images_run_with_their_channels_last_where_the_model_takes_them(refuses: bool) -> None:
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    data = images, torch.arange(32) % 3

    def train(strategy: lockstep.Strategy) -> tuple[Any, dict[str, Tensor]]:
        model = images_to_classes()
        if refuses:
            model[5] = Viewing()
        trainer = make_trainer(strategy, model, precision="fp32")
        trainer.fit(data, epochs=3, batch_size=16, verbose=0)
        return trainer, model.state_dict()

    trainer, ours = train(lockstep.PipelineStrategy(cuts=["3"], microbatches=2))
    assert trainer.plan.channels_last is not refuses
    _, alone = train(lockstep.SingleDeviceStrategy())
    for name, value in alone.items():
        assert ours[name].allclose(value, rtol=1e-3, atol=1e-4), name


def both(make: Any, strategy: lockstep.Strategy, data: Any, **options: Any) -> None:
    """Two fits under the strategy and alone end with the same weights and slots."""
    found = []
    for each in (strategy, lockstep.SingleDeviceStrategy()):
        torch.manual_seed(11)
        trainer = make_trainer(each, make(), **options)
        for _ in range(2):
            trainer.fit(data, batch_size=16, verbose=0)
        found.append(trainer)
    ours, alone = found
    for name, value in alone.model.state_dict().items():
        assert ours.model.state_dict()[name].allclose(value, rtol=0, atol=1e-12), name
    assert len(ours.optimizer.state) == len(alone.optimizer.state)


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def parameterless_first() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("make", [frozen_first, parameterless_first])
def test_slots_stay_where_the_first_stage_trains_nothing(make: Any) -> None:
    strategy = lockstep.PipelineStrategy(cuts=["2"], microbatches=2)
    both(make, strategy, (X, Y), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


class KeepsView(nn.Module):
    """Sends a view of a tensor that it changes afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(16, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        view = hidden.view(-1, 2, 4)
        hidden = self.second(self.relu(hidden))
        logits: Tensor = self.third(torch.cat([hidden, view.flatten(1)], 1))
        return logits


class TwoLSTMs(nn.Module):
    """Hands a state of two tensors on, whose sizes are no multiples of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(2, 3, batch_first=True), nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.first(x.unflatten(1, (3, 2)))
        hidden, _ = self.second(hidden, state)
        logits: Tensor = hidden.sum(1)
        return logits


@pytest.mark.parametrize(("make", "cut"), [(KeepsView, "second"), (TwoLSTMs, "second")])
@pytest.mark.parametrize("recompute", [False, True])
def test_values_cross_as_they_are_in_the_end(make: Any, cut: str, recompute: bool) -> None:
    job = lockstep.Job(
        make(), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), (X, Y), batch_size=16
    )
    strategy = lockstep.PipelineStrategy(cuts=[cut], microbatches=3, recompute=recompute)
    report = lockstep.verify(job, strategy)
    assert report.passed, report


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def spectral() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    return nn.Sequential(layer, nn.Tanh(), nn.Tanh(), nn.Linear(8, 3))


class Assigned(nn.Module):
    """A running mean that it divides by, and assigns anew."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = (self.mean + x.detach().square().mean()) / 2
        return x / self.mean


def assigned() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Assigned(), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("make", [normalised, spectral, assigned])
def test_buffers_change_once_when_activations_are_computed_again(make: Any) -> None:
    torch.manual_seed(12)
    job = lockstep.Job(
        make(), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), (X, Y), batch_size=16
    )
    strategy = lockstep.PipelineStrategy(cuts=["3"], microbatches=1, recompute=True)
    report = lockstep.verify(job, strategy)
    assert report.passed, report


def test_many_stages() -> None:
    job = lockstep.Job(
        nn.Sequential(*(nn.Linear(6, 6) for _ in range(9))),
        nn.CrossEntropyLoss(),
        torch.optim.Adam,
        (X, Y),
        batch_size=16,
    )
    report = lockstep.verify(job, lockstep.PipelineStrategy(9, microbatches=4), steps=2)
    assert report.passed, report


class LookBetween(lockstep.Callback):
    """Evaluates in the middle of an epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(self.trainer.evaluate((X, Y), batch_size=50)["loss"])


def test_a_look_at_the_model_between_steps_sees_all_stages() -> None:
    found = []
    strategy = lockstep.PipelineStrategy(cuts=["3"], microbatches=1)
    for each in (strategy, lockstep.SingleDeviceStrategy()):
        torch.manual_seed(13)
        rest = normalised()
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), *rest.children())
        look = LookBetween()
        make_trainer(each, model, callbacks=[look]).fit((X, Y), batch_size=16, verbose=0)
        found.append(look.losses)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_torchs_fused_layers_run_in_mixed_precision() -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.Linear(2, 8),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    strategy = lockstep.PipelineStrategy(cuts=["4"], microbatches=2)
    trainer = make_trainer(strategy, model, precision="bf16-mixed")
    trainer.fit((X, Y), batch_size=16, verbose=0)
    assert trainer.predict(X).shape == (50, 3)


def test_a_loss_that_looks_at_weights_of_another_stage_is_refused() -> None:
    model = make_model()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        penalty = model[0].weight.square().sum()  # type: ignore[index]
        total: Tensor = nn.functional.cross_entropy(output, target) + penalty
        return total

    trainer = lockstep.Trainer(
        model,
        loss=loss,
        optimizer=torch.optim.Adam,
        strategy=lockstep.PipelineStrategy(2, microbatches=2),
    )
    with pytest.raises(OptionError, match=r"a loss that uses .*0\.weight"):
        trainer.fit((X, Y), verbose=0)


def microbatch_runs(but: list[MicrobatchRun] | None = None) -> list[MicrobatchRun]:
    known = {id(one) for one in but or []}
    return [one for one in gc.get_objects() if type(one) is MicrobatchRun and id(one) not in known]


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_microbatch_run_waits_for_the_garbage_collector(schedule: str) -> None:
    trainer = make_trainer(lockstep.PipelineStrategy(2, None, 4, schedule))
    trainer.fit((X, Y), batch_size=16, verbose=0)
    gc.collect()
    before = microbatch_runs()  # the traceback of an error in another test may have one
    gc.disable()
    try:
        trainer.fit((X, Y), batch_size=16, verbose=0)
        assert not microbatch_runs(but=before)
    finally:
        gc.enable()


SCRIPT = """
from dataclasses import dataclass
import torch, lockstep
from torch import nn

@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, labels):
        logits = self.second(torch.tanh(self.first(x)))
        return Output(nn.functional.cross_entropy(logits, labels), logits)

data = {"x": torch.randn(20, 4), "labels": torch.randint(0, 3, (20,))}
trainer = lockstep.Trainer(
    Net(),
    loss=lockstep.OwnLoss(),
    optimizer=torch.optim.SGD,
    strategy=lockstep.PipelineStrategy(2, microbatches=2),
)
print(len(trainer.fit(data, batch_size=10, verbose=0).history["loss"]))
"""


@pytest.mark.exhaustive
def test_an_output_may_be_of_a_class_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert (done.stdout.strip(), done.stderr) == ("1", "")


def test_no_model_waits_for_the_garbage_collector() -> None:
    def trained() -> weakref.ref[nn.Module]:
        trainer = make_trainer(lockstep.PipelineStrategy(2))
        trainer.fit((X, Y), batch_size=16, verbose=0)
        trainer.close()
        return weakref.ref(trainer.model)

    gc.collect()
    gc.disable()
    try:
        assert trained()() is None
    finally:
        gc.enable()
