"""Updaters: stepping on pieces is stepping on the whole, bit by bit, with every optimizer.

Ranks are played one after the other in this process: each has the updater as it arrives in a
helper, and Parameters of its own in the memory of the first rank's.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep
from lockstep.comm.collectives.gradients import cut_piece
from lockstep.errors import ModelError, OptionError
from lockstep.parallel.storage.store import ParameterStore, TensorStore, tensor_spec
from lockstep.parallel.transfer.serialization import pack, unpack
from lockstep.parallel.updater_interface import BoundPiece, PieceSlots, assemble_slots
from lockstep.plan.layout import Extent, Piece
from lockstep.train.optim.fused_step import fastest_form
from lockstep.train.optim.optimizer_checks import check_hooks, make_optimizer
from lockstep.train.optim.optimizer_kinds import ELEMENTWISE, PARAMETERWISE
from lockstep.train.optim.optimizer_state import place_slots
from lockstep.train.optim.updaters import TorchUpdater
from tests.thorough import core_of

Parameters = dict[str, nn.Parameter]
MakeOptimizer = Callable[[Any], optim.Optimizer]

# One element, none, around the alignment of cuts, larger, in another layout.
SHAPES = {
    "scale": (),
    "one": (1,),
    "none": (0, 3),
    "bias": (129,),
    "weight": (40, 33),
    "images": (8, 5, 3, 3),
}
UNUSED_AT = {1: "bias", 2: "weight"}  # step -> parameter without a gradient
STEPS = 4


def make_parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    generator = torch.Generator().manual_seed(5)
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
    }
    images = parameters["images"]
    images.data = images.data.contiguous(memory_format=torch.channels_last)
    return parameters


def make_gradients(parameters: Parameters, step: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in parameters.items():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        gradients[name] = torch.empty_like(parameter).copy_(values).detach()
    if step in UNUSED_AT:
        gradients[UNUSED_AT[step]] = None
    return gradients


@dataclass
class Rank:
    """One rank: its updater and the pieces it is bound to."""

    updater: TorchUpdater
    pieces: list[BoundPiece]


class Ranks:
    """All ranks of one host."""

    def __init__(self, optimizer: optim.Optimizer, parameters: Parameters, num_ranks: int) -> None:
        ParameterStore.adopt(list(parameters.items()))
        self.leader = TorchUpdater(optimizer, parameters)
        keys = self.leader.slot_keys()
        specs = [tensor_spec(key.slot, parameters[key.parameter]) for key in keys]
        self.slot_store = TensorStore.create(specs)
        self.leader.store_slots(dict(zip(keys, self.slot_store.views, strict=True)))
        own, stored = list(parameters.values()), self.slot_store.views
        serialized = pack(self.leader, [*own, *stored])
        updaters = [self.leader]
        for _ in range(num_ranks - 1):
            theirs = [nn.Parameter(one.detach()) for one in own]
            updaters.append(unpack(serialized.payload, serialized.region, [*theirs, *stored]))
        extents = [tensor_spec(name, value).extent for name, value in parameters.items()]
        self.ranks = [
            self._bind(updater, updater.divide(extents, num_ranks, num_ranks)[rank])
            for rank, updater in enumerate(updaters)
        ]

    @staticmethod
    def _bind(updater: TorchUpdater, pieces: list[Piece]) -> Rank:
        names = list(updater.parameters)
        bound = []
        for piece in pieces:
            parameter = updater.parameters[names[piece.parameter]]
            tensor = cut_piece(parameter.detach(), piece).requires_grad_()
            bound.append(BoundPiece(name=names[piece.parameter], piece=piece, tensor=tensor))
        updater.bind(bound)
        return Rank(updater, bound)

    def step(self, gradients: dict[str, Tensor | None]) -> None:
        for rank in self.ranks:
            for bound in rank.pieces:
                gradient = gradients[bound.name]
                bound.tensor.grad = (
                    None if gradient is None else cut_piece(gradient, bound.piece).clone()
                )
        for rank in self.ranks:
            rank.updater.step()

    def slots(self) -> list[PieceSlots]:
        return [part for rank in self.ranks for part in rank.updater.slots(with_stored=True)]

    def finish(self) -> None:
        """As after ``fit``: the user's optimizer gets the slots of all ranks."""
        self.leader.take_slots([part for rank in self.ranks for part in rank.updater.slots()])


def step_whole(
    optimizer: optim.Optimizer, parameters: Parameters, gradients: dict[str, Tensor | None]
) -> None:
    """On one device, in the form that Lockstep chooses."""
    for name, parameter in parameters.items():
        gradient = gradients[name]
        parameter.grad = None if gradient is None else gradient.clone()
    with fastest_form(optimizer):
        optimizer.step()


def assert_same_values(left: Parameters, right: Parameters) -> None:
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_same_slots(
    left: optim.Optimizer, right: optim.Optimizer, ours: Parameters, theirs: Parameters
) -> None:
    for name, parameter in ours.items():
        if not parameter.numel():  # nothing to update: no rank has it
            continue
        mine, other = left.state.get(parameter, {}), right.state.get(theirs[name], {})
        assert mine.keys() == other.keys(), name
        for slot, value in mine.items():
            equal = torch.equal if torch.is_tensor(value) else operator.eq
            assert equal(value, other[slot]), (name, slot)


# --- every elementwise optimizer of torch -------------------------------------------------------

OPTIONS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.SGD: [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True},
    ],
    optim.Adam: [
        {"lr": 0.1, "weight_decay": 0.01, "amsgrad": True},
        {"lr": 0.1, "betas": (0.5, 0.7), "maximize": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.AdamW: [{"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.3, "amsgrad": True}],
    optim.Adamax: [{"lr": 0.1, "weight_decay": 0.01}],
    optim.NAdam: [{"lr": 0.1, "weight_decay": 0.01, "decoupled_weight_decay": True}],
    optim.RAdam: [{"lr": 0.1, "weight_decay": 0.01}],
    optim.RMSprop: [
        {"lr": 0.01, "alpha": 0.8, "weight_decay": 0.01},
        {"lr": 0.01, "momentum": 0.9, "centered": True},
    ],
    optim.Adagrad: [
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.3}
    ],
    optim.Adadelta: [{"lr": 0.5, "weight_decay": 0.01}],
    optim.ASGD: [{"lr": 0.1, "weight_decay": 0.01, "t0": 2}],
    optim.Rprop: [{"lr": 0.1, "etas": (0.4, 1.3)}],
}
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


def elementwise_cases() -> Iterator[Any]:
    for kind, options in OPTIONS.items():
        for number, option in enumerate(options):
            ways: list[dict[str, Any]] = [{}, {"foreach": True}]
            if kind in FUSED and not torch.is_tensor(option["lr"]):
                ways.append({"fused": True})
            for way in ways:
                name = "-".join([kind.__name__, str(number), *way])
                if torch.is_tensor(option["lr"]) and way:
                    continue  # torch refuses foreach with a learning rate in a tensor
                yield pytest.param(partial(kind, **option, **way), id=name)


def test_every_optimizer_that_is_called_elementwise_is_tried() -> None:
    assert set(OPTIONS) == ELEMENTWISE
    assert not ELEMENTWISE & PARAMETERWISE


@pytest.mark.parametrize("dtype", core_of([torch.float32, torch.float64], [torch.float32]), ids=str)
@pytest.mark.parametrize("make", [*elementwise_cases()])
def test_pieces_are_stepped_as_the_whole_bit_by_bit(
    make: MakeOptimizer, dtype: torch.dtype
) -> None:
    whole = make_parameters(dtype)
    reference = make(whole.values())
    gradients = [make_gradients(whole, step) for step in range(STEPS)]
    for step in range(STEPS):
        step_whole(reference, whole, gradients[step])
    for num_ranks in (2, 3, 4, 8):  # 8 cut the parameter that lies in another layout
        parameters = make_parameters(dtype)
        optimizer = make(parameters.values())
        ranks = Ranks(optimizer, parameters, num_ranks)
        for step in range(STEPS):
            ranks.step(gradients[step])
        ranks.finish()
        assert_same_values(parameters, whole)
        assert_same_slots(optimizer, reference, parameters, whole)


@pytest.mark.parametrize("make", [*elementwise_cases()])
def test_slots_go_from_any_number_of_ranks_to_any_other(make: MakeOptimizer) -> None:
    whole = make_parameters()
    reference = make(whole.values())
    parameters = make_parameters()
    optimizer = make(parameters.values())
    for step, num_ranks in enumerate((3, 1, 4, 2, 3)):
        gradients = make_gradients(whole, step)
        step_whole(reference, whole, gradients)
        ranks = Ranks(optimizer, parameters, num_ranks)
        ranks.step(gradients)
        ranks.finish()
    assert_same_values(parameters, whole)
    assert_same_slots(optimizer, reference, parameters, whole)


def test_slots_in_another_layout_than_their_parameter_are_cut_right() -> None:
    """As after ``Optimizer.load_state_dict``, which keeps a saved slot's layout."""
    whole, parameters = make_parameters(), make_parameters()
    reference, optimizer = (optim.Adam(one.values(), lr=0.1) for one in (whole, parameters))
    gradients = make_gradients(whole, 0)
    for one, owned in ((reference, whole), (optimizer, parameters)):
        step_whole(one, owned, gradients)
    slots = optimizer.state[parameters["images"]]
    for slot in ("exp_avg", "exp_avg_sq"):
        slots[slot] = slots[slot].contiguous()
        assert slots[slot].stride() != parameters["images"].stride()
    step_whole(reference, whole, gradients)
    ranks = Ranks(optimizer, parameters, 8)
    assert sum(bound.name == "images" for rank in ranks.ranks for bound in rank.pieces) > 1
    ranks.step(gradients)
    assert_same_values(parameters, whole)


def test_work_is_divided_evenly_and_every_rank_has_a_part() -> None:
    parameters = make_parameters()
    ranks = Ranks(optim.SGD(parameters.values(), lr=0.1), parameters, 4).ranks
    sizes = [sum(bound.tensor.numel() for bound in rank.pieces) for rank in ranks]
    assert sum(sizes) == sum(parameter.numel() for parameter in parameters.values())
    assert min(sizes) > 0.5 * sum(sizes) / 4


def test_an_unused_piece_is_not_stepped() -> None:
    parameters = make_parameters()
    optimizer = optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.5)
    ranks = Ranks(optimizer, parameters, 3)
    before = parameters["weight"].detach().clone()
    gradients = make_gradients(parameters, 0)
    ranks.step({**gradients, "weight": None})
    assert torch.equal(parameters["weight"], before)
    assert "weight" not in {part.name for part in ranks.slots()}
    ranks.step(gradients)
    assert not torch.equal(parameters["weight"], before)
    ranks.finish()
    counts = {name: optimizer.state[parameters[name]]["step"].item() for name in ("weight", "bias")}
    assert counts == {"weight": 1, "bias": 2}


def make_groups(parameters: Parameters, kind: Callable[..., optim.Optimizer]) -> optim.Optimizer:
    groups = [
        {"params": [parameters["weight"], parameters["scale"]], "lr": 0.2, "weight_decay": 0.1},
        {"params": [parameters["bias"]], "lr": 0.01},
        {"params": [], "lr": 0.5},
    ]
    return kind(groups, lr=0.1)  # images and the others are not trained


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW], ids=lambda kind: kind.__name__)
def test_groups_keep_their_options_and_what_is_in_none_is_not_trained(
    kind: Callable[..., optim.Optimizer],
) -> None:
    whole, parameters = make_parameters(), make_parameters()
    reference, optimizer = make_groups(whole, kind), make_groups(parameters, kind)
    ranks = Ranks(optimizer, parameters, 3)
    for step in range(3):
        gradients = make_gradients(whole, step)
        step_whole(reference, whole, gradients)
        ranks.step(gradients)
    assert_same_values(parameters, whole)
    assert torch.equal(parameters["images"], make_parameters()["images"])


# --- options and schedulers ---------------------------------------------------------------------


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["a number", "a tensor"])
def test_a_schedulers_learning_rate_reaches_every_rank(lr: Any) -> None:
    whole, parameters = make_parameters(), make_parameters()
    reference, optimizer = (optim.Adam(one.values(), lr=lr) for one in (whole, parameters))
    schedules = [optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in (reference, optimizer)]
    ranks = Ranks(optimizer, parameters, 3)
    for step in range(3):
        gradients = make_gradients(whole, step)
        step_whole(reference, whole, gradients)
        ranks.step(gradients)
        before = ranks.leader.options()
        for schedule in schedules:
            schedule.step()  # and no warning that the optimizer has not stepped
        changed = ranks.leader.options()
        assert changed != before
        for rank in ranks.ranks:
            rank.updater.set_options(changed)
    assert_same_values(parameters, whole)


def test_options_are_a_copy_without_the_parameters() -> None:
    optimizer = optim.Adam([("w", nn.Parameter(torch.ones(1)))], lr=torch.tensor(0.1))
    (options,) = TorchUpdater(optimizer, {}).options()
    options["lr"].fill_(9)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)
    assert not {"params", "param_names"} & options.keys()


# --- optimizers that see more than elements -----------------------------------------------------


def matrices() -> Parameters:
    return {name: value for name, value in make_parameters().items() if name == "weight"} | {
        f"matrix{size}": nn.Parameter(torch.linspace(-1, 1, 12 * size).reshape(size, 12))
        for size in (5, 9, 30)
    }


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_parameterwise_optimizers_get_whole_parameters(
    kind: Callable[..., optim.Optimizer], num_ranks: int
) -> None:
    whole, parameters = matrices(), matrices()
    reference, optimizer = (kind(one.values(), lr=0.1) for one in (whole, parameters))
    ranks = Ranks(optimizer, parameters, num_ranks)
    assert all(rank.pieces for rank in ranks.ranks)
    for step in range(3):
        gradients = make_gradients(whole, step)
        step_whole(reference, whole, gradients)
        ranks.step(gradients)
    ranks.finish()
    assert_same_values(parameters, whole)
    assert_same_slots(optimizer, reference, parameters, whole)


class ClippedAdam(optim.Adam):
    """Clips by the norm of all gradients together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step()


class Lookahead(optim.Optimizer):
    """Wraps another optimizer (Zhang et al. 2019)."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner
        self.param_groups = inner.param_groups
        self.slow = [one.detach().clone() for one in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            parameter.copy_(slow.lerp_(parameter, 0.5))


def with_hook(parameters: Any) -> optim.Optimizer:
    """Keeps the weights within bounds after every step."""
    optimizer = optim.SGD(parameters, lr=0.5)

    def clamp(optimizer: optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.clamp_(-0.5, 0.5)

    optimizer.register_step_post_hook(clamp)
    return optimizer


def with_own_step(parameters: Any) -> optim.Optimizer:
    optimizer = optim.SGD(parameters, lr=0.5)
    original = optimizer.step

    def step() -> None:
        original()
        original()

    optimizer.step = step  # type: ignore[method-assign,assignment]
    return optimizer


UNKNOWN: dict[str, MakeOptimizer] = {
    "clips all gradients": ClippedAdam,
    "wraps another": lambda parameters: Lookahead(optim.Adam(parameters, lr=0.1)),
    "has a hook": with_hook,
    "has a step of its own": with_own_step,
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_is_unknown_is_stepped_whole_by_the_first_rank(name: str, num_ranks: int) -> None:
    whole, parameters = make_parameters(), make_parameters()
    reference, optimizer = (UNKNOWN[name](one.values()) for one in (whole, parameters))
    ranks = Ranks(optimizer, parameters, num_ranks)
    assert not any(rank.pieces for rank in ranks.ranks[1:])
    for step in range(STEPS):
        gradients = make_gradients(whole, step)
        step_whole(reference, whole, gradients)
        ranks.step({**gradients, "none": None})
    ranks.finish()
    assert_same_values(parameters, whole)
    assert_same_slots(optimizer, reference, parameters, whole)
    assert all(parameter.grad is None for parameter in parameters.values())


@pytest.mark.parametrize("place", ["a hook of all optimizers", "around the class's step"])
def test_what_is_put_around_the_steps_of_all_optimizers_is_done_on_one_device(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    original = optim.SGD.step

    @functools.wraps(original)
    def step(*arguments: Any) -> Any:
        steps.append(1)
        return original(*arguments)

    trainer = lockstep.Trainer(
        nn.Linear(3, 1), loss=nn.MSELoss(), optimizer=partial(optim.SGD, lr=0.1)
    )
    with ExitStack() as stack:
        if place == "a hook of all optimizers":
            hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
            stack.callback(hook.remove)
        else:
            monkeypatch.setattr(optim.SGD, "step", step)
        trainer.fit((torch.ones(4, 3), torch.ones(4, 1)), batch_size=2, verbose=0)
    assert len(steps) == 2


# --- the user's optimizer -----------------------------------------------------------------------


def test_an_optimizer_is_an_instance_or_is_made_from_the_parameters() -> None:
    model = nn.Linear(3, 2)
    instance = optim.SGD(model.parameters(), lr=0.1)
    assert make_optimizer(instance, model) is instance
    for factory in (partial(optim.Adam, lr=0.1), optim.Adam, lambda given: optim.Adam(given)):
        made = make_optimizer(factory, model)
        assert made.param_groups[0]["params"] == [model.weight, model.bias]


STRANGERS: dict[str, tuple[Any, str]] = {
    "a name": ("adam", "Received: str"),
    "no optimizer": (lambda parameters: list(parameters), "Received: list"),
    "of another model": (optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), "2 tensors that are"),
    "LBFGS": (optim.LBFGS, "LBFGS evaluates"),
    "SparseAdam": (optim.SparseAdam, "Received: SparseAdam"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_optimizers_that_cannot_be_used_are_refused(name: str) -> None:
    optimizer, message = STRANGERS[name]
    with pytest.raises(OptionError, match=message):
        make_optimizer(optimizer, nn.Linear(3, 2))


def test_slots_follow_a_model_to_float64() -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
    make_optimizer(optimizer, model.double())
    slots = optimizer.state[model.weight]
    assert slots["sum"].dtype == torch.float64
    assert slots["step"].dtype == torch.float32


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_refused_by_name(register: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    check_hooks(model)
    getattr(model[0].bias, register)(lambda *_: None)
    with pytest.raises(ModelError, match=r"hooks on 0\.bias"):
        check_hooks(model)


# --- slots --------------------------------------------------------------------------------------


def test_pieces_join_to_slots_in_the_parameters_layout() -> None:
    parameters = make_parameters()
    images = parameters["images"]
    flat = torch.arange(360.0)
    pieces = [
        PieceSlots(
            name="images", start=start, stop=stop, slots={"sum": flat[start:stop], "step": 3}
        )
        for start, stop in ((128, 360), (0, 128))
    ]
    slots = assemble_slots(pieces, dict(parameters))["images"]
    assert slots["step"] == 3
    assert slots["sum"].stride() == images.stride()
    assert torch.equal(slots["sum"], flat.as_strided(images.shape, images.stride()))


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.NAdam, optim.ASGD])
def test_what_slots_there_are_is_known_without_the_device(kind: Any) -> None:
    """Which alone can step this way."""
    parameters = {"weight": nn.Parameter(torch.empty(4, 3, device="meta"))}
    options: Any = {"lr": torch.tensor(0.1), "capturable": True, "foreach": True}
    found = TorchUpdater(kind(parameters.values(), **options), parameters).slot_keys()
    plain = TorchUpdater(kind(parameters.values()), parameters).slot_keys()
    assert found == plain != []


@pytest.mark.parametrize(
    ("make", "staying"),
    [
        (optim.Adam, {"step"}),
        (partial(optim.Adam, capturable=True), set()),
        (partial(optim.Adagrad, initial_accumulator_value=0.1), {"step"}),
        (optim.NAdam, {"step", "mu_product"}),
        (optim.Adafactor, {"step"}),
        (optim.ASGD, {"step"}),
        (optim.Muon, set()),
    ],
    ids=["Adam", "Adam, capturable", "Adagrad", "NAdam", "Adafactor", "ASGD", "Muon"],
)
def test_slots_go_where_their_parameters_are(make: MakeOptimizer, staying: set[str]) -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = make([weight])
    (group,) = optimizer.param_groups
    ways, group["capturable"] = group.get("capturable", False), False  # no core steps this way
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    group["capturable"] = ways
    moved = nn.Parameter(weight.to("meta"))
    group["params"] = [moved]
    slots = optimizer.state[moved] = optimizer.state.pop(weight)
    place_slots(optimizer)
    on_device = {name for name, value in slots.items() if getattr(value, "is_meta", False)}
    assert on_device == {name for name in slots if slots[name] is not None} - staying
    assert all(slots[name].device.type == "cpu" for name in staying)


def test_slots_are_cut_and_joined_on_their_device() -> None:
    weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    optimizer = optim.Muon([weight])
    optimizer.state[weight]["momentum_buffer"] = torch.empty(4, 3, device="meta")
    updater = TorchUpdater(optimizer, {"weight": weight})
    ((piece,),) = updater.divide([Extent(num_elements=12, element_bytes=4)], 1, 1)
    tensor = weight.detach().requires_grad_()
    updater.bind([BoundPiece(name="weight", piece=piece, tensor=tensor)])
    (slots,) = updater.slots()
    assert slots.slots["momentum_buffer"].device.type == "meta"
    sums = torch.empty(12, device="meta")
    halves = [
        PieceSlots(name="weight", start=start, stop=stop, slots={"sum": sums[start:stop]})
        for start, stop in ((0, 6), (6, 12))
    ]
    assert assemble_slots(halves, {"weight": weight})["weight"]["sum"].device.type == "meta"


def test_joined_slots_are_copies() -> None:
    value, count = torch.ones(1), torch.tensor(2.0)
    piece = PieceSlots(name="one", start=0, stop=1, slots={"sum": value, "step": count})
    slots = assemble_slots([piece], dict(make_parameters()))["one"]
    value.zero_()
    count.zero_()
    assert (slots["sum"].item(), slots["step"].item()) == (1.0, 2.0)


def test_extents_of_parameters_without_elements_have_no_pieces() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.empty(0))], lr=0.1)
    updater = TorchUpdater(optimizer, {})
    assert updater.divide([Extent(num_elements=0, element_bytes=4)], 2, 2) == [[], []]
