"""The parity table of pipelines: every schedule on every model against a plain loop, in fp64.

Microbatches do not divide the batches, the last batch is short, and in some cases it has fewer
samples than there are microbatches. Stages have replicas, in equal numbers or not.
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

import lockstep
from tests.thorough import core_of
from tests.zoo import case, cases, make_job

# BatchNorm's statistics are those of a microbatch; see test_batch_norm_agrees_in_one_microbatch.
MODELS = [one.name for one in cases() if one.name != "cnn_batch_norm"]
THREE_LAYERS = ("lstm", "two_inputs")
STRATEGIES = {
    "2-1f1b": lockstep.PipelineStrategy(stages=2, microbatches=3),
    "2-gpipe-again": lockstep.PipelineStrategy(2, None, 4, "gpipe", recompute=True),
    "2-interleaved": lockstep.PipelineStrategy(2, None, 5, "interleaved"),
    "3-zb-h1": lockstep.PipelineStrategy(3, None, 4, "zb-h1"),
    "3-1f1b-first-again": lockstep.PipelineStrategy(3, microbatches=4, recompute=[0, 1]),
    "4-1f1b": lockstep.PipelineStrategy(4, None, 6),
    "4-zb-h2": lockstep.PipelineStrategy(4, None, 7, "zb-h2"),
    "data-2-pipe-2": lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
    "data-3-1": lockstep.HybridStrategy(data=(3, 1), microbatches=2),
    "data-1-3-zb-h1": lockstep.HybridStrategy(data=(1, 3), microbatches=2, schedule="zb-h1"),
    "data-2-1-tensor-2-gloo": lockstep.HybridStrategy(
        (2, 1), tensor=2, microbatches=2, schedule="zb-h1", engine="gloo"
    ),
    "2-1f1b-gloo": lockstep.PipelineStrategy(2, microbatches=3, engine="gloo"),
    "2-interleaved-gloo": lockstep.PipelineStrategy(2, None, 5, "interleaved", engine="gloo"),
    "3-zb-h1-gloo": lockstep.PipelineStrategy(3, None, 4, "zb-h1", engine="gloo"),
    "3-gpipe-gloo": lockstep.PipelineStrategy(3, None, 2, "gpipe", recompute=[1], engine="gloo"),
    "shard-2-pipe-2-gloo": lockstep.HybridStrategy(
        pipe=2, shard=2, level="slots", microbatches=2, engine="gloo"
    ),
}


CELLS = core_of(
    [
        (model, strategy)
        for model in MODELS
        for strategy in STRATEGIES
        if not (model in THREE_LAYERS and strategy.startswith("4"))
    ],
    lambda model, strategy: (
        (model, strategy) == ("unet", "data-2-pipe-2")
        or (model == "gpt_tied" and strategy not in ("3-gpipe-gloo", "data-2-1-tensor-2-gloo"))
    ),
)


@pytest.mark.parametrize(("model", "strategy"), CELLS)
def test_training_equals_one_device(model: str, strategy: str) -> None:
    report = lockstep.verify(make_job(case(model)), STRATEGIES[strategy], steps=5)
    assert report.passed, str(report)
    assert not report.undetermined


@pytest.mark.parametrize("model", THREE_LAYERS)
def test_more_stages_than_layers(model: str) -> None:
    report = lockstep.verify(make_job(case(model)), lockstep.PipelineStrategy(4), steps=2)
    assert report.passed, str(report)


class OnePiece(nn.Module):
    """Decides by values, and takes statistics of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        output: Tensor = self.last(x) if bool(x.isfinite().all()) else x[:, :3]
        return output


def test_what_is_one_piece_runs_as_on_one_device() -> None:
    model, data = OnePiece(), (torch.randn(41, 6), torch.randint(3, (41,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = lockstep.Job(model, nn.CrossEntropyLoss(), optimizer, data, batch_size=16)
    report = lockstep.verify(job, lockstep.PipelineStrategy(2), steps=2)
    assert report.passed, str(report)


def test_a_stage_of_which_nothing_is_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[2].requires_grad_(False)
    data = torch.randn(9, 6), torch.randint(3, (9,))
    job = lockstep.Job(model, nn.CrossEntropyLoss(), torch.optim.SGD, data, batch_size=4)
    strategy = lockstep.HybridStrategy(2, 2, cuts=["2"], microbatches=1, engine="gloo")
    report = lockstep.verify(job, strategy, steps=2)
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "engine", [None, pytest.param("gloo", marks=pytest.mark.exhaustive)], ids=["None", "gloo"]
)
def test_batch_norm_agrees_in_one_microbatch(engine: str | None) -> None:
    strategy = lockstep.PipelineStrategy(stages=3, microbatches=1, engine=engine)
    report = lockstep.verify(make_job(case("cnn_batch_norm")), strategy, steps=5)
    assert report.passed, str(report)


@pytest.mark.parametrize("sizes", [(8, 3), (4, 4)], ids=["last batch", "every batch"])
def test_a_sample_without_statistics_is_explained(sizes: tuple[int, int]) -> None:
    """In 4 microbatches: while training, and before it, when the model is traced."""
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.PipelineStrategy(2, microbatches=4),
    )
    data = torch.randn(sum(sizes), 5), torch.randn(sum(sizes), 2)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        trainer.fit(data, batch_size=sizes[0], verbose=0)
    assert "Use fewer microbatches" in " ".join(caught.value.__notes__)


class Siamese(nn.Module):
    """Calls a module with statistics twice, with a layer before and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        output: Tensor = self.last(self.shared(x) - self.shared(x.flip(1)))
        return output


@pytest.mark.parametrize("stages", [2, 3])
def test_statistics_of_a_module_that_is_called_twice_are_in_one_stage(stages: int) -> None:
    torch.manual_seed(7)
    x = torch.randn(32, 6, dtype=torch.float64)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    job = lockstep.Job(Siamese(), nn.CrossEntropyLoss(), optimizer, (x, x.argmax(1) % 3), 16)
    report = lockstep.verify(job, lockstep.PipelineStrategy(stages, microbatches=1))
    assert report.passed, str(report)


class Moded(nn.Module):
    """Does something else in each mode, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x * 3 if self.training else x)
        return F.dropout(output, 0.5, self.training)


def test_modules_in_evaluation_mode_stay_what_they_are() -> None:
    torch.manual_seed(6)
    model = nn.Sequential(Moded(), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[0].eval()
    model[2].eval()
    x = torch.randn(32, 6, dtype=torch.float64)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    job = lockstep.Job(model, nn.CrossEntropyLoss(), optimizer, (x, x.argmax(1) % 3), 16)
    report = lockstep.verify(job, lockstep.PipelineStrategy(2, microbatches=2))
    assert report.passed, str(report)


class EarlyOutput(nn.Module):
    """Returns what its first layer makes, too; cut in two, that is an output of an early stage."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x)
        return code, self.decoder(code)


class Code(torchmetrics.Metric):
    """Keeps the outputs and targets as they are, as metrics do that look at all samples."""

    codes: list[Tensor]
    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("codes", default=[], dist_reduce_fx=None)
        self.add_state("seen", default=[], dist_reduce_fx=None)

    def update(self, output: tuple[Tensor, Tensor], target: Tensor) -> None:
        self.codes.append(output[0])
        self.seen.append(target)

    def compute(self) -> Tensor:
        return torch.cat(self.codes).square().sum() + 1000 * torch.cat(self.seen).square().sum()


def decoded_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return (output[1] - target).square().mean()


SAMPLES = torch.linspace(-1, 1, 40 * 3, dtype=torch.float64).reshape(40, 3)
WANTED = SAMPLES[:, :2].sin()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(SAMPLES.split(4), WANTED.split(4), strict=True)


def inputs() -> Iterator[tuple[Tensor]]:
    yield from ((part,) for part in SAMPLES.split(4))


def early_output(strategy: lockstep.Strategy) -> lockstep.Trainer:
    torch.manual_seed(0)
    model = EarlyOutput()
    return lockstep.Trainer(
        model,
        loss=decoded_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        metrics={"code": Code()},
        strategy=strategy,
        precision="fp64",
    )


KEEPING = {
    "pipeline": lockstep.PipelineStrategy(2, microbatches=2),
    "pipeline over gloo": lockstep.PipelineStrategy(2, microbatches=2, engine="gloo"),
    "hybrid": lockstep.HybridStrategy(data=2, pipe=2, microbatches=1),
    "data parallel": lockstep.MirroredStrategy(2),
}


@pytest.mark.parametrize("strategy", KEEPING)
def test_outputs_of_all_stages_are_predicted(strategy: str) -> None:
    """There are more batches than slots of mail, or of a stream."""
    trainer = early_output(KEEPING[strategy])
    for data, batch_size in ((SAMPLES, 4), (inputs, None)):
        outputs = trainer.predict(data, batch_size=batch_size)
        with torch.no_grad():
            expected = trainer.model(SAMPLES)
        torch.testing.assert_close(outputs, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("strategy", KEEPING)
def test_metrics_may_keep_outputs_of_all_stages(strategy: str) -> None:
    found = []
    for each in (lockstep.SingleDeviceStrategy(), KEEPING[strategy]):
        trainer = early_output(each)
        data = (SAMPLES, WANTED)
        evaluated = trainer.evaluate(data, batch_size=4)["code"]
        streamed = trainer.evaluate(batches)["code"]
        trained = trainer.fit(data, batch_size=4, shuffle=False, verbose=0).history["code"]
        trained_on_stream = trainer.fit(batches, verbose=0).history["code"]
        found.append([evaluated, streamed, *trained, *trained_on_stream])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


class Unchanged(nn.Module):
    """Returns a view of its input beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, 1:], self.layer(x)


@pytest.mark.parametrize("devices", [1, 2])
def test_inputs_of_a_stream_may_be_outputs(devices: int) -> None:
    trainer = lockstep.Trainer(
        Unchanged(), strategy=lockstep.MirroredStrategy(devices), precision="fp64"
    )
    outputs = trainer.predict(inputs)
    assert torch.equal(outputs[0], SAMPLES[:, 1:])


class Packed(nn.Module):
    """Runs over sequences of different lengths; it and torch fill memory without values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 6)
        self.rnn = nn.GRU(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        start = torch.empty(1, len(tokens), 5, dtype=self.head.weight.dtype).zero_()
        output: Tensor = self.head(self.rnn(packed, start)[1][0])
        return output


def test_packed_sequences() -> None:
    inputs = torch.randint(30, (23, 7)), torch.randint(1, 8, (23,))
    job = lockstep.Job(
        Packed(), nn.CrossEntropyLoss(), torch.optim.Adam, (inputs, torch.randint(3, (23,))), 9
    )
    report = lockstep.verify(
        job, lockstep.PipelineStrategy(2, microbatches=3, engine="gloo"), steps=2
    )
    assert report.passed, str(report)
