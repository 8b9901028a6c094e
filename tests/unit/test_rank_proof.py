"""Ways in which a helper may differ from the script: carried over, or named before step 0."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.data.map_style.sources import Batch
from lockstep.errors import ModelError
from lockstep.parallel.loss.share_losses import ShareLoss
from lockstep.train.runtime.runner import Runner
from lockstep.train.validation.rank_consistency import (
    Print,
    check_ranks_agree,
    first_difference,
    is_like,
    print_of,
    samples_of,
)

pytestmark = pytest.mark.thorough

X = torch.linspace(-2, 2, 48).reshape(8, 6).sin()
Y = torch.arange(8) % 3
FACTOR = 1.0
REGISTRY: set[str] = set()
NUMBERS = random.Random(0)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class Own(nn.Module):
    """Computes with whatever a script can change."""

    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.cache: float | None = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cache": None}

    def forward(self, x: Tensor) -> Tensor:
        numbers = (
            FACTOR
            + len(REGISTRY)
            + float(os.environ.get("LOCKSTEP_TEST_FACTOR", "0"))
            + (0.5 if self.cache == 2.0 else 0)
            + NUMBERS.getstate()[1][1] % 7 / 7
            + float(np.hypot(3, 4)) / 10
        )
        x = torch.tanh(F.relu(x) * numbers * self.slope).sigmoid()
        halved: Tensor = Halved.apply(x)  # type: ignore[no-untyped-call]
        return halved


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.own = Own()
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        found: Tensor = self.head(self.drop(self.own(self.norm(self.first(x)))))
        return found


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def trainer_of(model: nn.Module, devices: int = 2) -> lockstep.Trainer:
    return lockstep.Trainer(
        model,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.MirroredStrategy(devices),
    )


def fit(model: nn.Module) -> None:
    trainer = trainer_of(model)
    try:
        trainer.fit((X, Y), batch_size=4, verbose=0)
    finally:
        trainer.close()


# --- named --------------------------------------------------------------------------------------


class Tripled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.tanh else result


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.ops.aten.tanh.default else result


@contextmanager
def hooked(register: Callable[[Any], Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def tripled_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 3 if isinstance(module, nn.Dropout) else None


def tripled_gradients(module: nn.Module, gradients: Any, _: Any) -> Any:
    return tuple(each * 3 for each in gradients) if isinstance(module, nn.Dropout) else None


Patch = pytest.MonkeyPatch
OWN, FIRST = "output of layer 'own' (Own)", "output of layer 'first' (Linear)"
PATCHES: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "a function of torch.nn.functional": (OWN, lambda to: to.setattr(F, "relu", F.gelu)),
    "a function of torch": (OWN, lambda to: to.setattr(torch, "tanh", torch.sin)),
    "a method of tensors": (OWN, lambda to: to.setattr(Tensor, "sigmoid", Tensor.cos)),
    "a function of NumPy": (OWN, lambda to: to.setattr(np, "hypot", np.arctan2)),
    "a layer's class": (
        FIRST,
        lambda to: to.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)),
    ),
    "a class of the user's": (OWN, lambda to: to.setattr(Own, "forward", lambda self, x: x / 3)),
    "a class's attribute": (OWN, lambda to: to.setattr(Own, "slope", 2.0)),
    "a module's global": (OWN, lambda to: to.setitem(globals(), "FACTOR", 2.0)),
    "a registry": (OWN, lambda to: to.setitem(globals(), "REGISTRY", {"Own"})),
    "a variable of the environment": (OWN, lambda to: to.setenv("LOCKSTEP_TEST_FACTOR", "2")),
    "random numbers of a module": (
        OWN,
        lambda to: to.setitem(globals(), "NUMBERS", random.Random(1)),
    ),
    "a backward pass": (
        "gradient of layer 'norm'",
        lambda to: to.setattr(Halved, "backward", staticmethod(lambda ctx, gradient: gradient)),
    ),
    "the loss's function": (
        "the loss",
        lambda to: to.setattr(F, "cross_entropy", F.multi_margin_loss),
    ),
}
SCOPES: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "a function mode": (OWN, Tripled),
    "a dispatch mode": (OWN, Dispatched),
    "a hook on all modules": (
        "output of layer 'drop'",
        partial(hooked, modules.register_module_forward_hook, tripled_output),
    ),
    "a backward hook on all modules": (
        "gradient of layer",
        partial(hooked, modules.register_module_full_backward_hook, tripled_gradients),
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_the_script_has_changed_is_named(name: str, monkeypatch: Patch) -> None:
    place, change = PATCHES[name]
    trainer = trainer_of(Net())
    trainer.fit((X, Y), batch_size=4, verbose=0)  # helpers have imported all that they need
    change(monkeypatch)
    weights = [one.clone() for one in trainer.model.parameters()]
    with pytest.raises(ModelError, match="Rank 1 does not compute what rank 0 computes") as caught:
        trainer.fit((X, Y), batch_size=4, verbose=0)
    assert place in str(caught.value)
    assert all(map(torch.equal, weights, trainer.model.parameters()))


# --- in stages ------------------------------------------------------------------------------------


class Middle(nn.Module):
    """Of functions, which a stage runs one by one."""

    def forward(self, x: Tensor) -> Tensor:
        halved: Tensor = torch.tanh(F.relu(x)).sigmoid() / 2
        return halved


class Staged(nn.Module):
    """Its second stage begins with ``second``, and takes a value from the first one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.middle = Middle()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        found: Tensor = self.head(self.middle(self.drop(self.second(x))) + x)
        return found


def steeper(layer: nn.Linear, x: Tensor) -> Tensor:
    """The same numbers, and three times their gradients."""
    found = F.linear(x, layer.weight, layer.bias)
    return found.detach() + 3 * (found - found.detach())


STAGES: dict[str, Callable[[], lockstep.Strategy]] = {
    "pipeline": lambda: lockstep.PipelineStrategy(cuts=["second"], microbatches=2),
    "hybrid": lambda: lockstep.HybridStrategy(data=2, cuts=["second"], microbatches=2),
}
SECOND = "output of layer 'second' (Linear)"
IN_STAGES: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "a layer's class": (SECOND, PATCHES["a layer's class"][1]),
    "the loss's function": PATCHES["the loss's function"],
    "a layer's backward": (
        "the gradient of",
        lambda to: to.setattr(nn.Linear, "forward", lambda self, x: steeper(self, x)),
    ),
    "a function within a layer": (
        "output of layer 'drop'",
        lambda to: to.setattr(F, "dropout", lambda x, *_: x),
    ),
}


def staged_trainer(strategy: str) -> lockstep.Trainer:
    return lockstep.Trainer(
        Staged(),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=STAGES[strategy](),
    )


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("name", IN_STAGES)
def test_what_a_stage_computes_otherwise_is_named(
    name: str, strategy: str, monkeypatch: Patch
) -> None:
    place, change = IN_STAGES[name]
    trainer = staged_trainer(strategy)
    trainer.fit((X, Y), batch_size=8, verbose=0)  # helpers have imported all that they need
    change(monkeypatch)
    weights = [one.clone() for one in trainer.model.parameters()]
    with pytest.raises(ModelError, match="Rank 1 does not compute what rank 0 computes") as caught:
        trainer.fit((X, Y), batch_size=8, verbose=0)
    assert place in str(caught.value)
    assert all(map(torch.equal, weights, trainer.model.parameters()))


@pytest.mark.parametrize("strategy", STAGES)
def test_functions_that_a_trace_holds_are_looked_at_anew(strategy: str, monkeypatch: Patch) -> None:
    """What the script has replaced between two calls is in the next trace, and so on all ranks."""

    def fitted(strategy: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Staged()
        model.drop.p = 0.0
        trainer = lockstep.Trainer(
            model,
            loss=loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            strategy=STAGES[strategy]() if strategy else None,
        )
        with monkeypatch.context() as patch:
            trainer.fit((X, Y), batch_size=8, verbose=0)
            patch.setattr(F, "relu", F.gelu)
            patch.setattr(Tensor, "sigmoid", Tensor.cos)
            trainer.fit((X, Y), batch_size=8, verbose=0)
        return [*model.parameters()]

    for one, other in zip(fitted(strategy), fitted(None), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("strategy", STAGES)
def test_a_proof_of_stages_leaves_no_trace(strategy: str, monkeypatch: Patch) -> None:
    found = []
    for prove in (Runner._prepare_proof, lambda *_: None):
        monkeypatch.setattr(Runner, "_prepare_proof", prove)
        torch.manual_seed(0)
        trainer = staged_trainer(strategy)
        trainer.fit((X, Y), batch_size=8, epochs=2, verbose=0)
        found.append([*trainer.model.state_dict().values()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", SCOPES)
def test_what_is_around_the_script_is_named(name: str) -> None:
    place, scope = SCOPES[name]
    with pytest.raises(ModelError, match="Rank 1 does not compute") as caught, scope():
        fit(Net())
    assert place in str(caught.value)


@pytest.mark.thorough  # the compiler takes seconds to import
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_before_a_model_is_compiled(monkeypatch: Patch) -> None:
    trainer = lockstep.Trainer(
        Net(),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.MirroredStrategy(2),
        compile=True,
    )
    monkeypatch.setattr(torch, "tanh", torch.sin)
    with pytest.raises(ModelError, match=r"output of layer 'own'"):
        trainer.fit((X, Y), batch_size=4, verbose=0)


def test_hosts_may_round_in_other_ways() -> None:
    x = torch.linspace(1, 2, 9)
    prints = [print_of("the output of layer 'a'", [x]), print_of("the gradient of layer 'a'", [x])]
    others = [
        print_of(place, [one]) for (place, *_), one in zip(prints, (x + 1e-6, -2 * x), strict=True)
    ]
    assert first_difference(prints, others) == "the output of layer 'a'"
    assert first_difference(prints, others, is_like) is None
    others[0] = print_of("the output of layer 'a'", [torch.nn.functional.gelu(x)])
    assert first_difference(prints, others, is_like) == "the output of layer 'a'"
    others[0] = print_of("the output of layer 'b'", [x])
    assert first_difference(prints, others, is_like) is None, "one has failed before its loss"
    loss_of = print_of("the loss", [x])
    found = first_difference([*prints, loss_of], [*others, loss_of], is_like)
    assert found == "the output of layer 'a'"


@pytest.mark.parametrize(
    ("kind", "factor", "message"),
    [
        ("cpu", 1 + 1e-6, "other bits, first in the output of the model"),
        ("cuda", 1 + 1e-6, None),
        ("cuda", 3.0, "something else, first in the output of the model"),
    ],
)
def test_accelerators_may_add_in_another_order(
    kind: str, factor: float, message: str | None
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)

    def told(own: list[Print]) -> list[list[Print]]:
        place, *_ = own[0]
        return [own, [print_of(place, [model(X) * factor]), *own[1:]]]

    def losses_alone(batch: Batch) -> list[ShareLoss]:
        model(batch.inputs)
        return []

    worker: Any = SimpleNamespace(
        model=model,
        plan=SimpleNamespace(
            devices=(f"{kind}:0", f"{kind}:1"), num_hosts=1, ranks_of_host=lambda host: (0, 1)
        ),
        passes=SimpleNamespace(user_losses=lambda: (), losses_alone=losses_alone),
        in_trial=nullcontext,
    )
    control: Any = SimpleNamespace(broadcast=lambda samples: samples, gather=told)
    expected = pytest.raises(ModelError, match=message) if message else nullcontext()
    with expected:
        check_ranks_agree(worker, control, (X, Y, None, len(X)))


def test_what_a_copy_has_lost_is_named() -> None:
    model = Net()
    model.own.cache = 2.0
    with pytest.raises(ModelError, match=r"output of layer 'own'"):
        fit(model)


# --- carried ------------------------------------------------------------------------------------


class Looking(nn.Module):
    """Computes with torch's settings."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        small = float(torch.full((1,), 1e-40, dtype=torch.float32).mul(0.5))
        settings = (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cudnn.allow_tf32,
            torch.is_autocast_enabled("cpu"),
            small == 0,
        )
        number = sum(ord(each) for each in str(settings))
        found: Tensor = self.head(x).float() * (number / 1000)
        return found


@contextmanager
def changed(write: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype": partial(changed, torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": partial(changed, torch.use_deterministic_algorithms, True, False),
    "matmul precision": partial(changed, torch.set_float32_matmul_precision, "high", "highest"),
    "mkldnn": partial(changed, partial(setattr, torch.backends.mkldnn, "enabled"), False, True),
    "flash attention": partial(changed, torch.backends.cuda.enable_flash_sdp, False, True),
    "TF32": partial(changed, partial(setattr, torch.backends.cudnn, "allow_tf32"), False, True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "denormals": partial(changed, torch.set_flush_denormal, True, False),
}


def with_a_forward_of_its_own(model: Net) -> None:
    model.own.forward = lambda x: x * 3  # type: ignore[method-assign]


def with_a_hook(model: Net) -> None:
    model.drop.register_forward_hook(tripled_output)


def with_a_closure(model: Net) -> None:
    """As in minGPT: a function that refers to the layers of the module that has it."""
    head = model.head
    model.drop.forward = lambda x: x + head(x).sum(1, keepdim=True)  # type: ignore[method-assign, assignment]


def with_a_parametrization(model: Net) -> None:
    parametrizations.weight_norm(model.first)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_carried(name: str) -> None:
    model = Looking()
    with SETTINGS[name]():
        fit(model)


@pytest.mark.parametrize(
    "change", [with_a_forward_of_its_own, with_a_hook, with_a_closure, with_a_parametrization]
)
def test_what_belongs_to_the_model_is_carried(change: Callable[[Net], None]) -> None:
    model = Net()
    change(model)
    fit(model)


class Turned(nn.Module):
    """Calls a layer in an order that each process has for itself, as a loop over a set of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.process = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        places = ["left", "right"] if os.getpid() == self.process else ["right", "left"]
        factors = {"left": 1.0, "right": -2.0}
        found = {place: self.first(x * factors[place]) for place in places}
        output: Tensor = self.head(found["left"] - found["right"])
        return output


def test_the_order_of_calls_that_gives_the_same_is_no_difference() -> None:
    fit(Turned())


def test_a_model_that_transformers_has_recorded_is_carried() -> None:
    from transformers import LlamaConfig, LlamaModel

    class Recorded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = LlamaConfig(
                hidden_size=6,
                intermediate_size=6,
                vocab_size=9,
                num_hidden_layers=2,
                num_attention_heads=1,
            )
            self.body = LlamaModel(config)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            found = self.body(inputs_embeds=x[:, None], output_hidden_states=True)
            output: Tensor = self.head(sum(found.hidden_states)[:, 0])
            return output

    model = Recorded()
    model(X)  # transformers now has hooks on it, which look at a variable of their module
    fit(model)


# --- no trace, no second time -------------------------------------------------------------------


@pytest.mark.parametrize("proves", [True, False])
def test_it_leaves_no_trace(proves: bool, monkeypatch: Patch) -> None:
    found = []
    for is_on in (proves, not proves):
        with nullcontext() if is_on else monkeypatch.context() as patched:
            if patched is not None:
                patched.setattr(Runner, "_prepare_proof", lambda *options: None)
            torch.manual_seed(1)
            model = Net()
            fit(model)
            found.append((model.state_dict(), model.num_calls, torch.get_rng_state()))
    (one, calls, stream), (other, other_calls, other_stream) = found
    assert all(one[name].equal(other[name]) for name in one)
    assert calls == other_calls
    assert stream.equal(other_stream)


def test_it_is_remembered(monkeypatch: Patch) -> None:
    proofs = []

    def counted(*options: Any) -> Any:
        proofs.append(1)
        return samples_of(*options)

    monkeypatch.setattr("lockstep.train.runtime.runner.samples_of", counted)
    trainer = trainer_of(Looking())
    for _ in range(3):
        trainer.fit((X, Y), batch_size=4, verbose=0)
    assert len(proofs) == 1
    trainer.model.added = 1  # type: ignore[assignment]
    trainer.fit((X, Y), batch_size=4, verbose=0)
    assert len(proofs) == 2
    trainer.close()
    trainer.fit((X, Y), batch_size=4, verbose=0)
    assert len(proofs) == 3
    trainer.close()
