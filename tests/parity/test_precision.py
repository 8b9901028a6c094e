"""Mixed precision and memory formats: as good as float32, and the same bits whoever computes."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import OptionError
from lockstep.parallel.data_parallel.forward import attend_in_float32
from tests.thorough import core_of
from tests.zoo import build_seeded, case, cases


@cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits: 8 x 8 images of ten classes."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(loaded.target)[order]


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def train(
    model: nn.Module, precision: str, strategy: Any, epochs: int = 1, steps: int = 5
) -> lockstep.Trainer:
    images, labels = digits()
    count = 100 * steps
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        strategy=strategy,
        precision=precision,
    )
    trainer.fit((images[:count], labels[:count]), batch_size=100, epochs=epochs, verbose=0)
    return trainer


def accuracy(trainer: lockstep.Trainer) -> float:
    images, labels = digits()
    outputs = trainer.predict(images[1400:], batch_size=100)
    return float((outputs.argmax(1) == labels[1400:]).double().mean())


def state_of(trainer: lockstep.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def state_of_model(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def different(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.exhaustive
def test_low_precision_reaches_the_accuracy_of_fp32_on_the_digits() -> None:
    strategy = lockstep.MirroredStrategy(2)
    found = {
        precision: accuracy(train(build_seeded(make_cnn), precision, strategy, epochs=8, steps=14))
        for precision in ("fp32", "bf16-mixed", "fp16-mixed", "bf16")
    }
    assert found["fp32"] > 0.96
    # Of 397 samples, three: which of them are right differs by one or two from CPU to CPU.
    assert found["bf16-mixed"] >= found["fp32"] - 0.01
    assert found["fp16-mixed"] >= found["fp32"] - 0.01
    assert found["bf16"] >= found["fp32"] - 0.015  # BatchNorm's statistics are rounded, too


@cache
def trained_on_three_devices(precision: str) -> dict[str, Tensor]:
    return state_of(train(build_seeded(make_cnn), precision, lockstep.MirroredStrategy(3)))


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("devices", core_of([1, 2, 3], [2]))
def test_mixed_precision_gives_the_same_bits_for_the_same_shares(
    devices: int, precision: str
) -> None:
    strategy = lockstep.MirroredStrategy(devices, num_shares=3)
    first = train(build_seeded(make_cnn), precision, strategy)
    assert different(state_of(first), trained_on_three_devices(precision)) == []
    parameters = first.model.parameters()
    assert all(parameter.dtype == torch.float32 for parameter in parameters)


class Overflowing(nn.Module):
    """Passes values on, and gradients a thousand times too large for float16, until ``calm``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calm", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and not self.calm:
            x.register_hook(lambda gradient: gradient * 1e3)
        return x


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_the_loss_scale_falls_until_float16_gradients_fit(devices: int) -> None:
    """Steps that overflow are left out by all ranks, and the scale lives on between fits."""
    images, labels = digits()
    model = build_seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Overflowing()))
    before = state_of_model(model)
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        strategy=lockstep.MirroredStrategy(devices, num_shares=6),
        precision="fp16-mixed",
    )
    data = images[:60], labels[:60]
    trainer.fit(data, batch_size=60, epochs=1, shuffle=False, verbose=0)
    scale = trainer.loss_scale
    assert scale == 2.0**15
    assert state_of_model(model)["1.weight"].equal(before["1.weight"])
    trainer.fit(data, batch_size=60, epochs=12, shuffle=False, verbose=0)
    assert trainer.loss_scale is not None
    assert 1 <= trainer.loss_scale < 2.0**12
    assert not state_of_model(model)["1.weight"].equal(before["1.weight"])


def test_there_is_a_loss_scale_in_float16_only() -> None:
    assert lockstep.Trainer(nn.Linear(2, 2)).loss_scale is None


def test_bf16_mixed_computes_in_bfloat16_on_every_replica() -> None:
    dtypes: list[torch.dtype] = []

    class Spy(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            dtypes.append(inputs.dtype)
            return inputs

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Spy())
    trainer = train(model, "bf16-mixed", lockstep.SingleDeviceStrategy())
    assert set(dtypes) == {torch.bfloat16}
    assert trainer.predict(digits()[0][:3]).dtype == torch.float32


@pytest.mark.parametrize(
    "name", core_of([one.name for one in cases()], ["cnn_batch_norm", "gpt_tied"])
)
def test_bf16_mixed_trains_every_model(name: str) -> None:
    """Near to fp32: what mixed precision cannot do shows as an error or as another loss."""
    job = case(name)
    losses = {}
    for precision in ("fp32", "bf16-mixed"):
        trainer = lockstep.Trainer(
            job.make_model(),
            loss=job.loss,
            optimizer=job.optimizer,
            strategy=lockstep.MirroredStrategy(2),
            precision=precision,
        )
        history = trainer.fit(
            (job.inputs, job.targets), batch_size=job.batch_size, epochs=2, verbose=0
        )
        losses[precision] = history.history["loss"]
    assert losses["bf16-mixed"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16-mixed"] != losses["fp32"]


# --- channels last -------------------------------------------------------------------------------


class Format(nn.Module):
    """Notes the memory format of what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images.is_contiguous(memory_format=torch.channels_last))
        return images


class Viewing(nn.Module):
    """Flattens with ``view``, which a tensor with its channels last refuses."""

    def forward(self, images: Tensor) -> Tensor:
        return images.view(len(images), -1)


def make_viewing() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        Format(),
        nn.Dropout(0.3),
        Viewing(),
        nn.Linear(288, 10),
    )


@pytest.mark.parametrize("make", [lockstep.SingleDeviceStrategy, lockstep.MirroredStrategy])
def test_images_run_with_their_channels_last(make: Callable[[], lockstep.Strategy]) -> None:
    model = build_seeded(make_cnn)
    model.insert(1, Format())  # type: ignore[operator]
    trainer = train(model, "fp32", make())
    seen = model[1].seen  # type: ignore[index]
    assert trainer.plan.channels_last
    assert seen
    assert all(seen)


@pytest.mark.parametrize("num_shares", [1, 2, 5])
def test_a_model_that_cannot_is_run_in_the_other_format(num_shares: int) -> None:
    """With nothing of the first attempt left: statistics and random streams are as if it had not
    been."""
    states = []
    for devices in (0, 1, min(num_shares, 2)):
        model = build_seeded(make_viewing)
        strategy: lockstep.Strategy = lockstep.SingleDeviceStrategy()
        if devices:
            strategy = lockstep.MirroredStrategy(devices, num_shares=num_shares)
        elif num_shares > 1:
            continue
        trainer = train(model, "fp32", strategy)
        states.append(state_of(trainer))
        seen = model[2].seen  # type: ignore[index]
        assert seen[0]
        assert not any(seen[num_shares:])
    assert all(different(states[0], each) == [] for each in states[1:])
    assert states[0]["1.num_batches_tracked"] == 5


class ViewingInEvaluation(nn.Module):
    """Needs torch's own format in one of its modes only."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) if self.training else images.view(len(images), -1)


def test_each_mode_of_a_model_finds_its_own_format() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), Format(), ViewingInEvaluation(), nn.Linear(288, 10))
    images, labels = digits()
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.MirroredStrategy(2),
    )
    data = images[:100], labels[:100]
    trainer.fit(data, batch_size=50, epochs=2, validation_data=data, verbose=0)
    assert model[1].seen == [True] * 2 + [True, False, False] + [True] * 2 + [False] * 2


class ViewingSometimes(nn.Module):
    """Fails in the Plan's format for a share with a bright sample, and for no other."""

    def forward(self, images: Tensor) -> Tensor:
        is_bright = bool((images[:, 0, 0, 0] > 5).any())
        return images.view(len(images), -1) if is_bright else images.flatten(1)


def test_one_share_that_fails_changes_no_bit_on_any_number_of_devices() -> None:
    images, labels = digits()
    images = images[:120].clone()
    images[45, 0, 0, 0] = 50.0  # in the third of four shares of the first batch
    states = []
    for devices in (1, 2, 4):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.Dropout(0.2), ViewingSometimes(), nn.Linear(512, 10)
        )
        trainer = lockstep.Trainer(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            strategy=lockstep.MirroredStrategy(devices, num_shares=4),
        )
        trainer.fit((images, labels[:120]), batch_size=60, shuffle=False, verbose=0)
        states.append(state_of(trainer))
    assert different(states[0], states[1]) == []
    assert different(states[0], states[2]) == []


@pytest.mark.parametrize("make", [lockstep.SingleDeviceStrategy, lockstep.MirroredStrategy])
def test_the_format_can_be_switched_off(make: Any) -> None:
    assert not make(channels_last=False).plan(make_cnn(), batch_size=10).channels_last
    with pytest.raises(OptionError, match="channels_last='no'"):
        make(channels_last="no")


class ViewingBackward(torch.autograd.Function):
    """Takes gradients for contiguous ones."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        return images * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view(-1).view(gradient.shape)


class ViewsBackward(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, ViewingBackward.apply(images))  # type: ignore[no-untyped-call]


def test_a_backward_pass_that_cannot_says_how_to_switch_it_off() -> None:
    model = build_seeded(make_cnn)
    model.insert(1, ViewsBackward())  # type: ignore[operator]
    model.insert(2, nn.Conv2d(model[0].out_channels, model[0].out_channels, 1))  # type: ignore
    with pytest.raises(RuntimeError) as caught:
        train(model, "fp32", lockstep.SingleDeviceStrategy())
    assert "SingleDeviceStrategy(channels_last=False)" in caught.value.__notes__[0]
    train(model, "fp32", lockstep.SingleDeviceStrategy(channels_last=False))


def test_the_other_format_gives_what_torch_gives() -> None:
    """A plain loop on the same batches, to the rounding of float32."""
    images, labels = digits()
    model, plain = build_seeded(make_viewing), build_seeded(make_viewing)
    for one in (model, plain):
        one[3].p = 0.0  # type: ignore[index]
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.MirroredStrategy(2),
    )
    trainer.fit((images[:300], labels[:300]), batch_size=100, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in range(0, 300, 100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            plain(images[start : start + 100]), labels[start : start + 100]
        )
        loss.backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_outputs_are_in_the_format_that_users_know() -> None:
    model = nn.Conv2d(3, 4, 3)
    trainer = lockstep.Trainer(model, strategy=lockstep.MirroredStrategy(2))
    outputs = trainer.predict(torch.randn(5, 3, 8, 8), batch_size=4)
    assert outputs.is_contiguous()
    assert tuple(outputs.shape) == (5, 4, 6, 6)


def test_float64_keeps_the_format_of_the_reference() -> None:
    plan = lockstep.MirroredStrategy(2).plan(make_cnn(), batch_size=10, precision="fp64")
    assert not plan.channels_last


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_float32_is_nearer_to_the_truth(masked: bool) -> None:
    """Values and gradients, with a mask given by position or by name; the type is autocast's."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = torch.randn(5, 5, generator=generator, dtype=torch.float64) if masked else None

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = [one.to(torch.bfloat16).to(dtype).requires_grad_() for one in exact]
        given = None if mask is None else mask.to(torch.bfloat16).to(dtype)
        output = function(*inputs, given) if masked else function(*inputs, is_causal=True)
        return [output, *torch.autograd.grad(output.double().square().sum(), inputs)]

    plain = nn.functional.scaled_dot_product_attention
    truth = run(plain, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found, torchs = run(attend_in_float32, torch.bfloat16), run(plain, torch.bfloat16)
    assert found[0].dtype == torch.bfloat16
    for ours, theirs, true in zip(found, torchs, truth, strict=True):
        error = (ours.double() - true).norm() / true.norm()
        assert error < 0.01
        assert error <= 1.5 * (theirs.double() - true).norm() / true.norm()


def test_attention_where_autocast_is_off_is_torchs_own() -> None:
    inputs = [torch.randn(1, 2, 3, 4) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        doubles = [one.double() for one in inputs]
        assert attend_in_float32(*doubles).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert attend_in_float32(*inputs).dtype == torch.float32


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.squeeze(1)
        return checkpoint(self.attend, tokens, use_reentrant=False).flatten(1)  # type: ignore[no-any-return]

    def attend(self, tokens: Tensor) -> Tensor:
        query, key, value = self.project(tokens).chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value)


@pytest.mark.exhaustive
def test_attention_that_is_computed_again_is_the_same() -> None:
    found = {}
    for precision in ("fp32", "bf16-mixed"):
        torch.manual_seed(0)
        model = nn.Sequential(Attending(), nn.Linear(64, 10))
        trainer = train(model, precision, lockstep.MirroredStrategy(2), epochs=10, steps=14)
        found[precision] = accuracy(trainer)
    assert found["fp32"] > 0.5
    assert found["bf16-mixed"] == pytest.approx(found["fp32"], abs=0.03)
