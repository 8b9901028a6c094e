"""Own losses and several losses: what is read, what is in the logs, and what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep import errors
from lockstep.data.map_style.sources import Batch
from lockstep.parallel.loss.joint_losses import JointAdapter
from lockstep.parallel.loss.model_losses import OwnLossAdapter
from lockstep.parallel.loss.share_losses import JointLoss, LossParts, ShareLoss
from tests.batches import batch_of
from tests.loss_zoo import (
    FACTORS,
    LOSSES,
    CausalModel,
    CausalOutput,
    Regression,
    TwoHeads,
    by_sample,
    causal_job,
    heads_job,
    padded_sequences,
    two_targets,
)

SGD = partial(torch.optim.SGD, lr=0.1)
VALUE = torch.tensor(0.5, requires_grad=True)
LOGITS = torch.ones(4, 3, requires_grad=True)
LABELS = torch.tensor([[1, 2, -100], [-100, -100, -100], [5, -100, 3], [0, 1, 2]])


def read(output: Any, weight: Any = None, inputs: Any = None) -> ShareLoss:
    batch = Batch(inputs=inputs, targets=None, sample_weight=None, num_samples=4)
    return OwnLossAdapter(lockstep.OwnLoss(weight))(output, batch)


# --- own losses ---------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "a scalar": VALUE,
    "a dict": {"logits": LOGITS, "loss": VALUE},
    "a tuple": (VALUE, LOGITS),
    "a list": [VALUE, LOGITS, None],
    "attributes": CausalOutput(loss=VALUE, logits=LOGITS),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_loss_is_found_in_every_form(name: str) -> None:
    share = read(FORMS[name])
    assert (share.total, share.weight) == (2.0, 4.0)
    share = read(FORMS[name], lambda inputs: inputs["mask"].sum(), {"mask": torch.ones(6)})
    assert (share.total, share.weight) == (3.0, 6.0)


def test_a_model_may_return_a_pair_or_values_itself() -> None:
    assert read((VALUE, 3)).sums == ((0.5, 3.0),)
    assert read({"loss": (VALUE, torch.tensor(3))}).sums == ((0.5, 3.0),)
    assert read({"loss": LOGITS.sum(1)}).sums == ((12.0, 4.0),)


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lockstep.OwnLoss.tokens(), 4),
        (lockstep.OwnLoss.tokens(shift=False), 7),
        (lockstep.OwnLoss.tokens(ignore_index=2, shift=False), 10),
    ],
)
def test_tokens_are_counted(loss: lockstep.OwnLoss, count: int) -> None:
    assert loss.weight is not None
    assert int(loss.weight({"labels": LABELS, "input_ids": LABELS})) == count


def test_labels_may_be_a_position_or_have_another_name() -> None:
    second, named = lockstep.OwnLoss.tokens(1), lockstep.OwnLoss.tokens("targets")
    assert second.weight is not None
    assert named.weight is not None
    assert int(second.weight((LOGITS, LABELS))) == 4
    assert int(named.weight({"targets": LABELS})) == 4


@pytest.mark.parametrize("mean", [VALUE * torch.nan, torch.zeros(())], ids=["NaN", "constant"])
def test_a_mean_of_nothing_is_nothing(mean: Tensor) -> None:
    logits = LOGITS.detach().clone().requires_grad_()
    share = read((mean, logits), lambda inputs: 0)
    assert (share.total, share.weight) == (0.0, 0.0)
    share.backward(4.0)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_mean_of_nothing_is_not_all_that_a_model_returns() -> None:
    with pytest.raises(errors.LossError, match="must return more than its loss"):
        read(VALUE * torch.nan, lambda inputs: 0)


class Sequences(Dataset[Any]):
    """As a tokenised set: every item a dict."""

    def __init__(self) -> None:
        self.columns = padded_sequences()

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def make_causal(devices: int = 2, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(7)
    given = {"loss": lockstep.OwnLoss.tokens(), "optimizer": SGD, **options}
    strategy = lockstep.MirroredStrategy(devices)
    return lockstep.Trainer(CausalModel(), strategy=strategy, precision="fp64", **given)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_model_trains_on_dicts_and_says_what_one_device_would(devices: int) -> None:
    trainer, columns = make_causal(devices), padded_sequences()
    with torch.no_grad():
        expected = trainer.model(**columns).loss.item()  # a mean over all tokens that count
    assert trainer.evaluate(columns, batch_size=7)["loss"] == pytest.approx(expected, rel=1e-12)
    assert trainer.evaluate(Sequences(), batch_size=9)["loss"] == pytest.approx(expected, rel=1e-12)
    history = trainer.fit(
        Sequences(), epochs=3, batch_size=11, validation_data=(columns,), verbose=0
    ).history
    assert history["val_loss"][-1] < expected
    del columns["labels"]
    outputs = trainer.predict(columns)
    assert outputs.loss is None
    assert outputs.logits.shape[0] == len(columns["input_ids"])


def test_arrays_and_datasets_train_the_same() -> None:
    trained = []
    for data in (padded_sequences(), (padded_sequences(),), Sequences()):
        trainer = make_causal()
        trainer.fit(data, batch_size=11, verbose=0)
        trained.append(trainer.model.state_dict())
    for other in trained[1:]:
        for name, value in trained[0].items():
            assert torch.equal(value, other[name])


def test_a_wrong_weight_is_found_out() -> None:
    job = causal_job()
    loss = lockstep.OwnLoss.tokens(shift=False)
    wrong = lockstep.Job(job.model, loss, job.optimizer, job.data, job.batch_size)
    with pytest.raises(errors.LossError, match="must be a weighted mean"):
        lockstep.verify(wrong, lockstep.MirroredStrategy(1, num_shares=2), steps=2)


def test_metrics_see_targets_that_are_given_beside() -> None:
    x = torch.randn(20, 6)
    inputs = {"x": x, "y": x[:, :2], "mask": torch.ones(20, 2)}
    trainer = lockstep.Trainer(
        Regression(by_sample),
        loss=lockstep.OwnLoss(),
        optimizer=SGD,
        metrics={"error": FirstOutputs()},
        strategy=lockstep.MirroredStrategy(2),
    )
    logs = trainer.fit((inputs, x[:, :2]), batch_size=8, verbose=0).history
    assert logs["error"][0] > 0
    assert logs["loss"][0] > 0


class FirstOutputs(torchmetrics.MeanMetric):
    def update(self, output: Any, target: Tensor) -> None:  # type: ignore[override]
        super().update(output["loss"] + 0 * target[:, 0])


OWN_REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no loss in a dict": ({"logits": LOGITS}, None, r"must return its loss.*dict with \['logits'"),
    "None": (None, None, "must return its loss.*NoneType"),
    "an empty tuple": ((), None, "must return a scalar.*tuple"),
    "text": ({"loss": "small"}, None, "must return a scalar.*str"),
    "values with a weight": (
        {"loss": LOGITS.sum(1)},
        lambda inputs: 4,
        r"must be a scalar.*shape \(4,\)",
    ),
    "a weight that is none": (VALUE, lambda inputs: None, "`weight` of OwnLoss that is NoneType"),
    "a negative weight": (VALUE, lambda inputs: -1, r"`weight` of OwnLoss that is -1\.0"),
    "a weight to train": (VALUE, lambda inputs: VALUE, "`weight` of OwnLoss that depends"),
    "no labels to count": (
        VALUE,
        lockstep.OwnLoss.tokens().weight,
        r"needs the labels among the inputs.*'labels' for inputs \['x'\]",
    ),
    "no such position": (VALUE, lockstep.OwnLoss.tokens(3).weight, r"labels=3 for inputs \['x'\]"),
}


@pytest.mark.parametrize("name", OWN_REFUSED)
def test_an_own_loss_that_is_none_is_refused(name: str) -> None:
    output, weight, message = OWN_REFUSED[name]
    with pytest.raises(errors.LossError, match=message):
        read(output, weight, {"x": LABELS})


def test_an_own_loss_cannot_weigh_samples() -> None:
    with pytest.raises(errors.LossError, match=r"must weigh the samples itself.*sample_weight"):
        OwnLossAdapter(lockstep.OwnLoss())(VALUE, batch_of(LABELS, torch.ones(4)))
    data = (padded_sequences(), torch.ones(47), torch.ones(47))
    with pytest.raises(errors.LossError, match="must weigh the samples itself"):
        make_causal(1).fit(data, verbose=0)


@pytest.mark.parametrize("weight", [3, "labels", int])
def test_a_weight_is_a_function(weight: Any) -> None:
    with pytest.raises(errors.OptionError, match="`weight` of OwnLoss must be a function"):
        lockstep.OwnLoss(weight)


# --- data without targets -----------------------------------------------------------------------


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), {"digit": nn.CrossEntropyLoss()}])
@pytest.mark.parametrize("data", [{"x": torch.ones(8, 8)}, (torch.ones(8, 8),)])
def test_losses_that_compare_need_targets(data: Any, loss: Any) -> None:
    trainer = lockstep.Trainer(TwoHeads(), loss=loss, optimizer=SGD)
    for use in (
        partial(trainer.fit, data, verbose=0),
        partial(trainer.evaluate, data),
        partial(trainer.fit, (torch.ones(8, 8), torch.ones(8)), validation_data=data, verbose=0),
    ):
        with pytest.raises(errors.DataError, match=r"needs targets.*OwnLoss"):
            use()


class Inputs(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(8)}


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), LOSSES])
def test_a_dataset_shows_at_the_first_step_that_it_has_no_targets(loss: Any) -> None:
    trainer = lockstep.Trainer(TwoHeads(), loss=loss, optimizer=SGD)
    with pytest.raises(errors.DataError, match="needs targets"):
        trainer.fit(Inputs(), verbose=0)


@pytest.mark.parametrize("data", [padded_sequences(), Sequences()], ids=["arrays", "a dataset"])
def test_metrics_need_targets(data: Any) -> None:
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    trainer = make_causal(1, metrics={"accuracy": metric})
    with pytest.raises(errors.DataError, match="Metrics need targets"):
        trainer.fit(data, verbose=0)


# --- several losses -----------------------------------------------------------------------------


def make_heads(devices: int = 2, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(7)
    given = {"loss": LOSSES, "loss_weights": FACTORS, "optimizer": SGD, **options}
    strategy = lockstep.MirroredStrategy(devices, num_shares=3)
    return lockstep.Trainer(TwoHeads(), strategy=strategy, precision="fp64", **given)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_logs_have_every_loss(devices: int) -> None:
    trainer = make_heads(devices)
    x, targets = two_targets(ignored=True)
    with torch.no_grad():
        outputs = trainer.model(x)
        digit = F.cross_entropy(outputs["digit"], targets["digit"]).item()
        parity = F.binary_cross_entropy_with_logits(outputs["parity"], targets["parity"]).item()
    logs = trainer.evaluate((x, targets), batch_size=7)
    assert list(logs) == ["loss", "digit_loss", "parity_loss"]
    assert list(logs.values()) == pytest.approx([digit + 0.5 * parity, digit, parity], rel=1e-12)
    history = trainer.fit(
        (x, targets), epochs=2, batch_size=11, validation_data=(x, targets), verbose=0
    ).history
    names = ["loss", "digit_loss", "parity_loss"]
    assert list(history) == [*names, *(f"val_{name}" for name in names)]
    for prefix in ("", "val_"):
        whole, digits, parities = (history[prefix + name] for name in names)
        for sums in zip(whole, digits, parities, strict=True):
            assert sums[0] == pytest.approx(sums[1] + 0.5 * sums[2], rel=1e-14)


def test_logs_have_the_same_bits_on_any_number_of_devices() -> None:
    x, targets = two_targets(ignored=True)
    histories = [
        make_heads(devices).fit((x, targets), epochs=2, batch_size=11, verbose=0).history
        for devices in (1, 2, 3)
    ]
    assert histories[0] == histories[1] == histories[2]


def test_logs_of_a_pipeline_have_every_loss() -> None:
    job = heads_job(ignored=False)
    logs = []
    for strategy in (lockstep.PipelineStrategy(2, microbatches=3), lockstep.MirroredStrategy(1)):
        trainer = lockstep.Trainer(
            heads_job().model,
            loss=job.loss,
            optimizer=job.optimizer,
            strategy=strategy,
            precision="fp64",
            loss_weights=job.loss_weights,
        )
        logs.append(trainer.fit(job.data, batch_size=11, shuffle=False, verbose=0).history)
    assert list(logs[0]) == ["loss", "digit_loss", "parity_loss"]
    for name, values in logs[0].items():
        assert values == pytest.approx(logs[1][name], rel=1e-12)


def test_losses_in_order_are_named_as_in_keras() -> None:
    adapter = JointAdapter([nn.MSELoss(), nn.L1Loss()], [1.0, 1.0])
    assert adapter.parts.log_names == ("loss", "output_1_loss", "output_2_loss")


def test_what_weighs_nothing_in_an_epoch_is_no_number() -> None:
    logs = LossParts(names=("a", "b"), factors=(1.0, 2.0)).logs([((3.0, 2.0), (0.0, 0.0))])
    assert logs["loss"] == logs["a_loss"] == 1.5
    assert logs["b_loss"] != logs["b_loss"]


def test_the_weights_of_the_batch_decide_what_a_share_adds() -> None:
    values = [torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)]
    losses = tuple(
        ShareLoss(values=(value,), seeds=(1.0,), total=value.item(), weight=1.0) for value in values
    )
    parts = LossParts(names=("a", "b"), factors=(1.0, 0.5))
    joint = JointLoss(losses=losses, parts=parts, num_samples=2)
    share = joint.settled([4.0, 0.0], 8)
    assert (share.total, share.weight) == (2.0 * 8 / 4, 2.0)
    share.backward(8.0)
    assert values[0].grad is not None
    assert values[0].grad.item() == 0.25
    assert values[1].grad is None  # nothing counts in the whole batch
    assert joint.settled([0.0, 0.0], 8).weight == 0


CROSS_ENTROPY = nn.CrossEntropyLoss()
WRONG: dict[str, tuple[Any, Any, str]] = {
    "none of several": ({}, None, "Several losses must be at least one"),
    "a name that is none": ({3: CROSS_ENTROPY}, None, "must be named by the keys.*3"),
    "a class": ({"a": nn.MSELoss}, None, r"loss\['a'\] must be callable.*class MSELoss"),
    "a number": ([CROSS_ENTROPY, 1.0], None, r"loss\[1\] must be callable.*1\.0"),
    "an own loss among others": (
        {"a": lockstep.OwnLoss()},
        None,
        r"loss\['a'\] must be callable.*OwnLoss",
    ),
    "weights for one loss": (CROSS_ENTROPY, {"a": 1.0}, "`loss_weights` goes with several"),
    "weights for no loss": (None, [1.0], "`loss_weights` goes with several"),
    "weights of strangers": ({"a": CROSS_ENTROPY}, {"b": 1.0}, r"\['b'\] beside losses \['a'\]"),
    "weights in another form": ({"a": CROSS_ENTROPY}, [1.0], "must have the form.*list"),
    "a weight for all": ({"a": CROSS_ENTROPY}, 1.0, "must have the form.*float"),
    "too few weights": ([CROSS_ENTROPY, CROSS_ENTROPY], [1.0], "1 for 2 losses"),
    "a weight that is text": ({"a": CROSS_ENTROPY}, {"a": "1"}, "finite numbers.*'1' for 'a'"),
    "a weight that is a flag": ({"a": CROSS_ENTROPY}, {"a": True}, "finite numbers.*True"),
    "an infinite weight": ([CROSS_ENTROPY], [float("inf")], "finite numbers.*inf for 0"),
    "a tensor to weigh": ([CROSS_ENTROPY], [torch.ones(())], "finite numbers.*tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_losses_that_cannot_be_are_refused_at_once(name: str) -> None:
    loss, factors, message = WRONG[name]
    with pytest.raises(errors.OptionError, match=f"(?s){message}"):
        make_heads(1, loss=loss, loss_weights=factors)


def test_a_job_has_the_same_rules() -> None:
    with pytest.raises(errors.OptionError, match=r"(?s)2 problems.*loss\['a'\].*\['b'\]"):
        lockstep.Job(TwoHeads(), {"a": 3}, SGD, None, 4, {"b": 1.0})


def test_a_metric_cannot_be_called_as_a_loss() -> None:
    with pytest.raises(errors.OptionError, match=r"name of a part of the loss.*digit_loss"):
        make_heads(1, metrics={"digit_loss": torchmetrics.MeanMetric()})


X, TARGETS = two_targets(ignored=False)
STRANGE: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no such output": (
        {**LOSSES, "size": nn.MSELoss()},
        TARGETS,
        errors.LossError,
        r"'size' needs an output.*dict with \['digit', 'parity'\]",
    ),
    "no output in that place": (
        list(LOSSES.values()),
        tuple(TARGETS.values()),
        errors.LossError,
        "'output_1' needs an output.*dict",
    ),
    "no such target": (
        LOSSES,
        {"digit": TARGETS["digit"]},
        errors.DataError,
        r"'parity' needs targets.*dict with \['digit'\]",
    ),
    "one target for all": (LOSSES, TARGETS["digit"], errors.DataError, "'digit' needs targets"),
    "a loss that breaks its contract": (
        {"digit": nn.CrossEntropyLoss(reduction="none"), "parity": lambda output, target: 3},
        TARGETS,
        errors.LossError,
        "The loss of 'parity': The loss must return a scalar",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_outputs_and_targets_must_fit_the_losses(name: str) -> None:
    loss, targets, error, message = STRANGE[name]
    with pytest.raises(error, match=message):
        make_heads(1, loss=loss, loss_weights=None).fit((X, targets), verbose=0)
