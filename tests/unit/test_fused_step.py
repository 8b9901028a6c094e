"""The form in which torch's own optimizers step: fused on CPUs, unless the user named one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.train.optim.fused_step import LastStep, fastest_form, step_adam, step_in_fastest_form

Parameters = list[nn.Parameter]


def parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    """One contiguous, one in another order, one that is first used in a later step."""
    generator = torch.Generator().manual_seed(0)
    sizes = (5, 40), (3, 4, 6, 6), (7,)
    values = [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]
    values[1] = values[1].to(memory_format=torch.channels_last)
    return [nn.Parameter(value) for value in values]


def set_gradients(own: Parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, one in enumerate(own):
        values = torch.randn(one.shape, generator=generator, dtype=one.dtype)
        is_used = number < 2 or step > 1
        one.grad = torch.empty_like(one).copy_(values).detach() if is_used else None


def trained(
    make: Callable[[Parameters], optim.Optimizer], step: Callable[[optim.Optimizer], None]
) -> tuple[Parameters, optim.Optimizer]:
    own = parameters()
    optimizer = make(own)
    for number in range(4):
        set_gradients(own, number)
        step(optimizer)
    return own, optimizer


class Operators(TorchDispatchMode):
    """Notes which operators of torch are called; some processors round all forms alike."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def step_itself(optimizer: optim.Optimizer) -> None:
    optimizer.step()


def step_fast(optimizer: optim.Optimizer) -> None:
    step_in_fastest_form(optimizer, optimizer.step)


OPTIONS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}),
    (optim.Adam, {"maximize": True, "lr": 1}),
    (optim.AdamW, {"weight_decay": 0.3}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.Adagrad, {"lr_decay": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_it_is_torchs_fused_form_bit_by_bit(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    makers: Any = kind
    own, optimizer = trained(lambda given: makers(given, **options), step_fast)
    theirs, reference = trained(lambda given: makers(given, fused=True, **options), step_itself)
    assert all(map(torch.equal, own, theirs))
    for mine, other in zip(own, theirs, strict=True):
        slots, wanted = optimizer.state[mine], reference.state[other]
        assert slots.keys() == wanted.keys()
        assert all(torch.equal(slots[name], wanted[name]) for name in slots)
    assert [group["fused"] for group in optimizer.param_groups] == [None]


@pytest.mark.parametrize("form", ["fused", "foreach"])
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.Adagrad])
def test_a_form_that_the_user_names_is_kept(kind: type[optim.Optimizer], form: str) -> None:
    makers: Any = kind
    with Operators() as operators:
        own, _ = trained(lambda given: makers(given, **{form: False}), step_fast)
    theirs, _ = trained(lambda given: makers(given, **{form: False}), step_itself)
    assert all(map(torch.equal, own, theirs))
    assert not any("_fused_" in name for name in operators.names)
    with Operators() as operators:
        trained(makers, step_fast)
    assert any("_fused_" in name for name in operators.names), "else the rest shows nothing"


def _is_plain(optimizer: optim.Optimizer) -> bool:
    with fastest_form(optimizer):
        return not step_adam(optimizer) and not optimizer.param_groups[0]["fused"]


def test_what_the_kernel_does_not_support_is_stepped_plainly() -> None:
    """It reads memory in order: with strides that differ it would mix up elements."""
    own = parameters()
    set_gradients(own, 5)
    assert not _is_plain(optim.Adam(own)), "else the rest shows nothing"
    turned = nn.Parameter(torch.randn(4, 6))
    turned.grad = torch.randn(6, 4).t()
    with_holes = nn.Parameter(torch.randn(4, 6)[:, ::2])
    with_holes.grad = torch.randn(4, 6)[:, ::2]
    half = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    mixed = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    for one in mixed:
        one.grad = torch.ones_like(one)
    sparse = nn.Parameter(torch.randn(5, 2))
    sparse.grad = torch.ones(5, 2).to_sparse(1)
    assert _is_plain(optim.Adam([turned]))
    assert _is_plain(optim.Adam([with_holes]))
    assert _is_plain(optim.Adam([half]))
    assert _is_plain(optim.AdamW(mixed))
    assert _is_plain(optim.Adagrad([sparse]))
    assert _is_plain(optim.Adam(own, lr=torch.tensor(0.1)))
    assert _is_plain(optim.Adam(own, differentiable=True))
    assert _is_plain(optim.SGD(own, momentum=0.9))


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.Adagrad])
def test_slots_in_another_order_than_their_parameter_are_stepped_plainly(
    kind: type[optim.Optimizer],
) -> None:
    """As after a model was converted to channels-last, with its optimizer's state made before."""
    makers: Any = kind
    own = parameters()
    optimizer = makers(own)
    set_gradients(own, 5)
    step_fast(optimizer)
    assert not _is_plain(optimizer), "else the rest shows nothing"
    own[1].data = own[1].detach().contiguous()
    set_gradients(own, 6)
    assert _is_plain(optimizer)


def test_the_form_is_given_back_after_an_error() -> None:
    own = parameters()
    set_gradients(own, 5)
    optimizer = optim.Adam(own)

    def fail() -> None:
        assert optimizer.param_groups[0]["fused"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), fastest_form(optimizer):
        fail()
    assert optimizer.param_groups[0]["fused"] is None


def regroup(optimizer: optim.Optimizer) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.1})


def load(optimizer: optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def halve(optimizer: optim.Optimizer) -> None:
    for slots in optimizer.state.values():
        slots["exp_avg"] = slots["exp_avg"] / 2


def turn(optimizer: optim.Optimizer) -> None:
    for one in optimizer.param_groups[0]["params"]:
        if one.dim() == 2:
            one.grad = one.grad.t().contiguous().t()


def forget(optimizer: optim.Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]].clear()


def renew(optimizer: optim.Optimizer) -> None:
    one = optimizer.param_groups[0]["params"][0]
    optimizer.state[one] = {name: value.clone() for name, value in optimizer.state[one].items()}


def leave_out(optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0].grad = None


def faster(optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[0].update(lr=0.3, weight_decay=0.2)


@pytest.mark.parametrize("change", [regroup, load, halve, turn, forget, renew, leave_out, faster])
def test_what_changes_between_steps_is_seen(change: Callable[[optim.Optimizer], None]) -> None:
    last = LastStep()

    def step_again(optimizer: optim.Optimizer) -> None:
        step_in_fastest_form(optimizer, optimizer.step, last)

    def train(step: Callable[[optim.Optimizer], None]) -> tuple[Parameters, optim.Optimizer]:
        own = parameters()
        optimizer = optim.AdamW(own, fused=True)
        for number in range(7):
            set_gradients(own, number)
            if number == 4:
                change(optimizer)
            step(optimizer)
        return own, optimizer

    own, optimizer = train(step_again)
    assert last.found is not None
    theirs, reference = train(step_itself)
    assert all(map(torch.equal, own, theirs))
    for mine, other in zip(own, theirs, strict=True):
        wanted = reference.state[other]
        assert all(torch.equal(optimizer.state[mine][name], wanted[name]) for name in wanted)
