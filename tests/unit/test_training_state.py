"""The state of a training as data: names, digest, comparison, tensors and JSON, what is refused."""

import math
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint.trees import pointer
from lockstep.errors import CheckpointError
from lockstep.train.checkpointing.training_state import TrainingState
from tests.states import from_flat

X, Y = torch.rand(24, 4), torch.rand(24, 2)


def make_state(**parts: Any) -> TrainingState:
    return TrainingState(
        parameters={"0.weight": torch.tensor([[1.5, -0.0]]), "a/b~.c": torch.zeros(0, 3)},
        buffers={"count": torch.tensor(7), "coarse": torch.tensor([1.5], dtype=torch.bfloat16)},
        optimizer={"0.weight": {"exp_avg": torch.ones(1, 2).t(), "step": 3, "none": None}},
        options=[{"lr": torch.tensor(0.1), "betas": (0.9, 0.999), "params": ["0.weight"]}],
        schedule={
            "milestones": Counter({2: 1}),
            "best": math.inf,
            "worst": math.nan,
            "pairs": {1: 2},
        },
        callbacks=[
            {"class": "Mine", "state": {"$odd": [1, {"deep": torch.ones(2)}], "f": -math.inf}}
        ],
        position={"epochs": 2, "steps": 1 << 40},
        **parts,
    )


def through_json(state: TrainingState) -> TrainingState:
    tensors, values = state.flat()
    return from_flat(tensors, msgspec.json.decode(msgspec.json.encode(values)))


def test_it_goes_through_tensors_and_json_unchanged() -> None:
    state = make_state()
    back = through_json(state)
    assert back.digest() == state.digest()
    assert type(back.schedule and back.schedule["milestones"]) is Counter
    assert back.options[0]["betas"] == (0.9, 0.999)
    assert back.schedule is not None
    assert math.isnan(back.schedule["worst"])
    assert back.callbacks[0]["state"]["f"] == -math.inf


def test_tensors_have_qualified_names_and_a_file_holds_them(tmp_path: Path) -> None:
    tensors, values = make_state().flat()
    assert set(tensors) == {
        "parameters/0.weight",
        "parameters/a~1b~0.c",
        "buffers/count",
        "buffers/coarse",
        "optimizer/0.weight/exp_avg",
        "options/0/lr",
        "callbacks/0/state/0/1/deep",
    }
    path = tmp_path / "state.safetensors"
    save_file({name: one.contiguous() for name, one in tensors.items()}, path)
    assert from_flat(load_file(path), values).digest() == make_state().digest()


def test_a_qualified_name_cannot_be_that_of_another() -> None:
    assert pointer(("a/b", "c")) != pointer(("a", "b/c"))
    assert pointer(("a~1b",)) != pointer(("a/b",))


def test_the_digest_is_a_known_one_and_does_not_depend_on_order_or_layout() -> None:
    state = make_state()
    assert len(state.digest()) == 64
    assert state.digest() == make_state().digest()
    turned = dict(reversed(state.parameters.items()))
    moved = {"0.weight": {**state.optimizer["0.weight"], "exp_avg": torch.ones(2, 1).contiguous()}}
    assert replace(state, parameters=turned, optimizer=moved).digest() == state.digest()


CHANGES: dict[str, dict[str, Any]] = {
    "a sign of zero": {"parameters": {"0.weight": torch.tensor([[1.5, 0.0]])}},
    "a dtype": {"buffers": {"count": torch.tensor(7, dtype=torch.int32)}},
    "a shape": {"buffers": {"count": torch.tensor([7])}},
    "a name": {"buffers": {"counts": torch.tensor(7)}},
    "an option": {"options": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
    "a tuple": {"options": [{"lr": 0.1, "betas": [0.9, 0.999]}]},
    "none": {"schedule": None},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows_in_the_digest(change: str) -> None:
    base = TrainingState(
        parameters={"0.weight": torch.tensor([[1.5, -0.0]])},
        buffers={"count": torch.tensor(7)},
        options=[{"lr": 0.1, "betas": (0.9, 0.999)}],
        schedule={},
    )
    assert replace(base, **CHANGES[change]).digest() != base.digest()


def test_values_that_are_the_same_number_of_another_kind_differ() -> None:
    values = [1, 1.0, True, "1", None, [1], (1,), {1: 1}, {"1": 1}, torch.tensor(1)]
    digests = {TrainingState(position={"value": value}).digest() for value in values}
    assert len(digests) == len(values)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.builds(torch.tensor, st.lists(st.integers(-9, 9), max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), TREES, max_size=3))
def test_any_tree_comes_back(tree: dict[str, Any]) -> None:
    state = TrainingState(position=tree)
    back = through_json(state)
    assert back.digest() == state.digest()
    assert repr(back.position) == repr(state.position)


@given(TREES)
def test_what_was_not_written_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError):
        from_flat({}, tree)


@pytest.mark.parametrize(
    "values",
    [
        {"$tensor": "no"},
        {"$tensor": 3},
        {"$tensor": "b", "more": 1},
        {"$odd": 1},
        {"$pairs": [1]},
        {"$pairs": [[[1], 2]]},
        {"$pairs": 3},
        {"$counter": [["a", "b"]]},
        {"$float": "x"},
        {"$float": None},
        {"$tuple": 3},
    ],
)
def test_malformed_values_are_refused(values: Any) -> None:
    plain = {each.name: None for each in fields(TrainingState)}
    with pytest.raises(CheckpointError, match="are damaged"):
        from_flat({"b": torch.ones(1)}, {**plain, "position": values})


def test_a_tensor_that_nothing_names_is_refused() -> None:
    tensors, values = make_state().flat()
    with pytest.raises(CheckpointError, match=r"nothing names: \['more'"):
        from_flat({**tensors, "more": torch.ones(1)}, values)


def test_what_is_no_plain_value_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"'callbacks/0/state/it', a object"):
        TrainingState(callbacks=[{"state": {"it": object()}}]).flat()


def test_numbers_of_numpy_are_numbers() -> None:
    state = TrainingState(position={"a": np.float64(0.1), "b": np.int32(3), "c": np.float32(0.5)})
    assert through_json(state).position == {"a": 0.1, "b": 3, "c": 0.5}


def test_a_copy_has_memory_of_its_own() -> None:
    state = make_state()
    copy = state.copied()
    state.parameters["0.weight"][:] = 9
    state.callbacks[0]["state"]["$odd"][1]["deep"][:] = 9
    assert copy.digest() == make_state().digest()


# --- of a Trainer --------------------------------------------------------------------------------


def make_trainer(model: nn.Module | None = None, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        nn.Linear(4, 2) if model is None else model,
        loss=nn.MSELoss(),
        **{"optimizer": torch.optim.Adam, **options},
    )


def test_a_state_is_a_copy_and_stays_as_it_is() -> None:
    trainer = make_trainer()
    trainer.fit((X, Y), verbose=0)
    state = trainer.state_dict()
    digest = TrainingState.of(state).digest()
    trainer.fit((X, Y), verbose=0)
    assert TrainingState.of(trainer.state_dict()).digest() != digest
    trainer.load_state_dict(state)
    assert TrainingState.of(trainer.state_dict()).digest() == digest
    trainer.fit((X, Y), verbose=0)
    assert TrainingState.of(state).digest() == digest


def test_torch_saves_and_loads_it_without_pickled_code(tmp_path: Path) -> None:
    schedule = lockstep.Schedule(lambda one: torch.optim.lr_scheduler.MultiStepLR(one, [1, 3]))
    trainer = make_trainer(schedule=schedule, average=lockstep.EMA(0.9))
    trainer.fit((X, Y), verbose=0)
    torch.save(trainer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert TrainingState.of(state).digest() == TrainingState.of(trainer.state_dict()).digest()


class Counting(nn.Module):
    """Keeps more than parameters and buffers."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.kept = state

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_what_modules_tell_of_themselves_is_a_part() -> None:
    state = make_trainer(Counting({"calls": 3})).state_dict()
    model = Counting({})
    make_trainer(model).load_state_dict(state)
    assert model.kept == {"calls": 3}


def test_a_module_that_tells_what_cannot_be_written_is_named() -> None:
    with pytest.raises(CheckpointError, match="'modules/', a set"):
        make_trainer(Counting({3})).state_dict()


def test_what_is_trained_is_a_part() -> None:
    trainer, other = make_trainer(), make_trainer()
    trainer.model.get_parameter("bias").requires_grad_(False)
    other.load_state_dict(trainer.state_dict())
    assert [one.requires_grad for one in other.model.parameters()] == [True, False]


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": nn.Linear(4, 3)}, "'weight' must be torch.float32 of shape .3, 4"),
    "another layer": ({"model": nn.Sequential(nn.Linear(4, 2))}, "without 0.bias, 0.weight"),
    "another precision": ({"precision": "fp64"}, "must be torch.float64"),
    "averages": ({"average": lockstep.EMA()}, "`averages`"),
    "a loss scale": ({"precision": "fp16-mixed"}, "`loss_scale`"),
    "a schedule": ({"schedule": torch.optim.lr_scheduler.ConstantLR}, "`schedule`"),
    "no optimizer": ({"optimizer": None}, "without an optimizer"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_script_is_refused_and_nothing_is_changed(other: str) -> None:
    options, message = OTHERS[other]
    trainer = make_trainer()
    trainer.fit((X, Y), verbose=0)
    receiver = make_trainer(**options)
    before = TrainingState.of(receiver.state_dict()).digest()
    with pytest.raises(CheckpointError, match=message):
        receiver.load_state_dict(trainer.state_dict())
    assert TrainingState.of(receiver.state_dict()).digest() == before


@pytest.mark.parametrize("state", [{}, None, {"parameters": {}}, nn.Linear(4, 2).state_dict()])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="The state of a training must have the parts"):
        make_trainer().load_state_dict(state)


class Keeper(lockstep.Callback):
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Other(lockstep.Callback):
    """Keeps nothing."""


def test_callbacks_get_theirs_by_class_and_order() -> None:
    first, second = Keeper(), Keeper()
    first.value, second.value = 3, 4
    state = make_trainer(callbacks=[first, Other(), second]).state_dict()
    fresh = Keeper(), Keeper()
    make_trainer(callbacks=[*fresh, Other()]).load_state_dict(state)
    assert [one.value for one in fresh] == [3, 4]
    with pytest.raises(CheckpointError, match="one more Keeper"):
        make_trainer(callbacks=[Keeper()]).load_state_dict(state)


def test_a_state_is_not_loaded_within_a_call() -> None:
    class Loading(lockstep.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.trainer.load_state_dict(self.trainer.state_dict())

    trainer = make_trainer(callbacks=[Loading()])
    with pytest.raises(CheckpointError, match="between two calls of fit"):
        trainer.fit((X, Y), verbose=0)


def test_averaged_weights_are_no_state() -> None:
    trainer = make_trainer(average=lockstep.EMA())
    trainer.fit((X, Y), verbose=0)
    state = trainer.state_dict()
    with trainer.averaged():
        with pytest.raises(lockstep.errors.OptionError, match="state_dict"):
            trainer.state_dict()
        with pytest.raises(lockstep.errors.OptionError, match="load_state_dict"):
            trainer.load_state_dict(state)
