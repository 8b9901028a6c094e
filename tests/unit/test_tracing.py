"""Tracing: every model's instructions do what the model does, and layers are where to cut it."""

import copy
import itertools
import operator
import pickle
import random
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lockstep.capture.instructions import (
    CallFunction,
    CallMethod,
    GetAttribute,
    Input,
    NamedFunction,
    Output,
    Ref,
    references,
    run_instruction,
)
from lockstep.capture.replaying import is_same
from lockstep.capture.tracing import (
    Trace,
    run_trace,
    trace_model,
    trace_modes,
)
from lockstep.data.order import seed_streams, stream_states
from lockstep.data.trees import map_tensors, tensors_of
from lockstep.errors import ModelError
from tests.thorough import core_of
from tests.zoo import Case, build_seeded, cases, normal

NUM_SAMPLES = 4

Make = Callable[[], nn.Module]


def samples(*shape: int, num_samples: int = NUM_SAMPLES) -> Tensor:
    return normal(torch.Generator().manual_seed(7), num_samples, *shape)


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def names_of(trace: Trace) -> list[str]:
    return [layer.name for layer in trace.layers]


def atomic_of(trace: Trace) -> dict[str, str]:
    return {layer.name: layer.reason for layer in trace.layers if layer.is_atomic}


def built(make: Make) -> Any:
    return build_seeded(make).double()


# --- models that a tracer may fail on, by what they have in them ----------------------------------


class BasicBlock(nn.Module):
    """A block of a residual network, with in-place operators."""

    def __init__(self, width: int, stride: int = 1, norm: Callable[[int], nn.Module] | None = None):
        super().__init__()
        norm = norm or nn.BatchNorm2d
        self.conv1 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.shorten = None if stride == 1 else nn.Conv2d(width, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.shorten is not None:
            identity = self.shorten(x)
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.blocks = nn.Sequential(BasicBlock(6, norm=norm), BasicBlock(6, 2, norm=norm))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.adaptive_avg_pool2d(self.blocks(x), 1)
        logits: Tensor = self.head(x.view(x.size(0), -1))
        return logits


class OddUNet(nn.Module):
    """Compares shapes, as sizes that are not even make necessary."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.bottom = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.Conv2d(8, 4, 3, padding=1)
        self.paint = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.down(x))
        u = F.interpolate(self.bottom(F.max_pool2d(a, 2)), scale_factor=2)
        if u.shape != a.shape:
            u = F.pad(u, (0, a.shape[-1] - u.shape[-1], 0, a.size(2) - u.size(2)))
        painted: Tensor = self.paint(self.up(torch.cat([a, u], 1)))
        return painted


class SizedGPT(nn.Module):
    """Attention by hand: sizes, a mask made in forward, tied embeddings used as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Embedding(16, 8)
        self.qkv = nn.Linear(8, 24)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.2)
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        batch, length = tokens.shape
        assert length <= 16, "too long"
        places = torch.arange(length, device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places)[None])
        q, k, v = self.qkv(x).split(8, dim=2)
        heads = [part.view(batch, length, 2, 8 // 2).transpose(1, 2) for part in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(-2, -1) * (1.0 / k.size(-1) ** 0.5)
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = (F.softmax(scores, dim=-1) @ heads[2]).transpose(1, 2).contiguous()
        x = x + self.mix(y.view(batch, length, -1))
        logits = F.linear(self.norm(x), self.embedding.weight)
        return logits, {"hidden": x, "last": x[:, [-1]]}


class Translator(nn.Module):
    """torch's own encoder and decoder, with a mask made for the sizes at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            8, 2, 2, 1, dim_feedforward=12, dropout=0.1, batch_first=True
        )
        self.head = nn.Linear(8, 5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.size(1), dtype=target.dtype, device=target.device
        )
        logits: Tensor = self.head(self.transformer(source, target, tgt_mask=mask))
        return logits


class RMSNorm(nn.Module):
    """Computes before it uses its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class OwnParameters(nn.Module):
    """Parameters, buffers and plain tensors of its own, used by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weights = nn.ParameterList([torch.randn(6, 6), torch.randn(6, 6)])
        self.norm = RMSNorm()
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.average: Tensor
        self.register_buffer("average", torch.zeros(6))
        self.offset = torch.linspace(0, 1, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = x * torch.exp(self.scale)
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight, bias=self.offset))
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        normal_x: Tensor = self.norm(x) * self.scale
        return normal_x


class Sizes(nn.Module):
    """Calculates with the number of samples in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        num, width = len(x), x.shape[1]
        y = self.linear(x).reshape(num * 2, width // 2)
        y = y.view(*x.shape[:-1], 2, -1).flatten(1)
        weights = torch.ones(num, 1, dtype=x.dtype) / num + torch.full((num, 1), num * 0.5)
        y = y * weights + x.new_zeros(x.size()) - (num - 2) ** 2 / -num
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1).expand(-1, width)
        return torch.gather(y, 0, rows).sum(0, keepdim=True).expand(max(num, 1), -1) + 3 % num


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = x
        x += 1
        x[:, 0] = 2.0
        x[:, 1:3] *= 3
        y = x.clone()
        half = y[:, :3]
        half.mul_(2)
        result: Tensor = self.last(self.act(y)) + kept
        return result


class Doubled(torch.autograd.Function):
    """Twice the gradient that it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Gradients(nn.Module):
    """Has a say in what backward does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.teacher = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = Doubled.apply(self.first(x))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            target = torch.tanh(self.teacher(x) * x.detach().mean())
        return self.last(x) + x.detach(), target


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 5)
        self.lstm = nn.LSTM(5, 4, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        state = torch.zeros(x.shape[0], 5, dtype=x.dtype)
        states = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        out, (hidden, cell) = self.lstm(torch.stack(states, 1))
        return {"out": out, "states": [hidden, cell], "steps": len(states), "none": None}


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Report:
    """An output with names."""

    logits: Tensor
    pair: Pair
    size: int
    note: str = "fine"


class Outputs(nn.Module):
    """Keyword arguments, a nested one among them, and outputs of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(2, 4)

    def forward(
        self, parts: dict[str, Any], *, factor: float, flag: bool = True, mask: Any = None
    ) -> Any:
        left = self.left(parts["left"]) * factor
        right = self.right(parts["rest"][0])
        if flag and mask is None:
            left = left + right
        found = OrderedDict(first=left, second=[right, left.shape])
        return found, Report(left + 1, Pair(left, right), left.shape[0])


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.same = self.linear

    def forward(self, x: Tensor) -> Tensor:
        twice: Tensor = self.linear(torch.relu(self.same(x)))
        return twice


class Noise(nn.Module):
    """Draws in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.table = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = F.dropout(x, 0.3, training=self.training) + 0.1 * torch.randn_like(x)
        keep = torch.rand(len(x), 1, dtype=x.dtype, device=x.device) < 0.5
        return torch.where(keep, x, torch.zeros_like(x)) * self.table[torch.tensor([0, 2, 1])].sum(
            0
        )


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 2)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return padded


class Attend(nn.Module):
    """Calls modules in unusual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, dropout=0.1)
        self.linear = nn.Linear(6, 6)
        self.lot = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Identity()})
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = x + self.attention(query=x, key=x, value=x, attn_mask=mask, need_weights=False)[0]
        x = self.linear.forward(x)
        for name, module in self.lot.items():
            x = module(x) if name == "a" else x + module(x)
        fresh = nn.Softplus(beta=2)
        return torch.einsum("bti,bti->bt", self.normed(fresh(x)), x.mT.transpose(1, 2))


class Routed(nn.Module):
    """Chooses samples by value, without deciding anything by it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        y = torch.zeros_like(x)
        y[chosen] = self.one(x[chosen])
        rows = (~chosen).nonzero()[:, 0]
        y = y.index_add(0, rows, self.other(x[rows]))
        return y.view(y.shape[0], 2, 3)


def partial_group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


PLAIN = {
    "resnet": (ResNet, samples(2, 8, 8)),
    "resnet without statistics": (lambda: ResNet(partial_group_norm), samples(2, 8, 8)),
    "odd unet": (OddUNet, samples(1, 7, 9)),
    "sized gpt": (SizedGPT, torch.arange(NUM_SAMPLES * 5).view(NUM_SAMPLES, 5) % 11),
    "translator": (Translator, (samples(5, 8), samples(3, 8))),
    "own parameters": (OwnParameters, samples(6)),
    "sizes": (Sizes, samples(6)),
    "in place": (InPlace, samples(6)),
    "gradients": (Gradients, samples(6)),
    "recurrent": (Recurrent, samples(3, 6)),
    "outputs": (
        Outputs,
        {"parts": {"left": samples(3), "rest": [samples(2)]}, "factor": 0.5, "mask": None},
    ),
    "shared module": (SharedModule, samples(6)),
    "noise": (Noise, samples(6)),
    "packed": (Packed, samples(3, 6)),
    "attend": (Attend, samples(3, 6)),
    "routed": (Routed, samples(6)),
}
# In the core, one test tries all of them, and the others these.
SOME = ("resnet", "sized gpt", "in place", "recurrent", "outputs", "shared module")


def with_num_samples(inputs: Any, num_samples: int) -> Any:
    def take(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.flip(0)] * num_samples)[:num_samples]

    return map_tensors(take, inputs)


def check_equal(trace: Trace, model: nn.Module, inputs: Any) -> None:
    """The same outputs, gradients, buffers and random streams, bit by bit."""
    found = []
    start = copy.deepcopy(model.state_dict())
    for forward in (partial(call, model, inputs), partial(run_trace, trace, model, inputs)):
        model.load_state_dict(start)
        model.zero_grad()
        seed_streams(5)
        with torch.set_grad_enabled(trace.training):
            outputs = forward()
        totals = [one.square().sum() for one in tensors_of(outputs) if one.requires_grad]
        if totals:
            torch.autograd.backward(torch.stack(totals).sum())
        gradients = [parameter.grad for parameter in model.parameters()]
        buffers = [buffer.clone() for buffer in model.buffers()]
        found.append((outputs, gradients, buffers, torch.get_rng_state()))
    model.zero_grad()
    assert type(found[0][0]) is type(found[1][0])
    assert is_same(found[0], found[1])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", PLAIN)
def test_instructions_do_what_the_model_does(name: str, training: bool) -> None:
    make, inputs = PLAIN[name]
    model = built(make).train(training)
    trace = trace_model(model, inputs, training=training)
    assert atomic_of(trace) == {}
    for num_samples in (NUM_SAMPLES, 2, 9):
        check_equal(trace, model, with_num_samples(inputs, num_samples))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_instructions_do_what_the_models_of_the_zoo_do(case: Case, training: bool) -> None:
    model = case.make_model().double().train(training)
    trace = trace_model(model, with_num_samples(case.inputs, NUM_SAMPLES), training=training)
    assert [*atomic_of(trace)] == (["flagged"] if case.name == "unused_branch" else [])
    for num_samples in (NUM_SAMPLES, 2, 9):
        check_equal(trace, model, with_num_samples(case.inputs, num_samples))


@pytest.mark.parametrize("name", core_of(PLAIN, SOME))
def test_a_trace_can_be_cut_between_any_layers(name: str) -> None:
    make, inputs = PLAIN[name]
    model = built(make)
    trace = trace_model(model, inputs, training=True)
    whole = gradients_of_cut(trace, model, inputs, len(trace.layers))
    cuts = [cut for cut in range(1, len(trace.layers)) if may_cut(trace, cut)]
    for cut in cuts:
        gradients = gradients_of_cut(trace, model, inputs, cut)
        assert [one is None for one in gradients] == [one is None for one in whole]
        for one, other in zip(gradients, whole, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def may_cut(trace: Trace, cut: int) -> bool:
    pairs = [[trace.instructions[one].layer for one in pair] for pair in trace.changes]
    return not any(first < cut <= last for first, last in pairs)


def gradients_of_cut(trace: Trace, model: nn.Module, inputs: Any, cut: int) -> list[Tensor | None]:
    """Of a training step, with copies of all values that cross from before ``cut`` to after it."""
    start = copy.deepcopy(model.state_dict())
    model.zero_grad()
    seed_streams(5)
    values: dict[int, Any] = {}
    copies: dict[int, Any] = {}

    def fetch(number: int) -> Any:
        instruction = trace.instructions[number]
        if isinstance(instruction, Input) and number not in values:
            return run_instruction(instruction, model, fetch, inputs)
        return copies.get(number, values[number])

    for number, instruction in enumerate(trace.instructions):
        if instruction.layer >= cut:
            for used in references(instruction):
                source = trace.instructions[used]
                if source.layer < cut and used not in copies and not isinstance(source, Input):
                    assert not isinstance(values[used], nn.Parameter)
                    copies[used] = map_tensors(copied_leaf, values[used])
        values[number] = run_instruction(instruction, model, fetch, inputs)
    outputs = [one for one in tensors_of(values[number]) if one.requires_grad]
    torch.autograd.backward(torch.stack([one.square().sum() for one in outputs]).sum())
    sent = [one for used in copies for one in tensors_of(values[used])]
    got = [one.grad for used in copies for one in tensors_of(copies[used])]
    pairs = [
        (one, gradient) for one, gradient in zip(sent, got, strict=True) if gradient is not None
    ]
    torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
    model.load_state_dict(start)
    return [parameter.grad for parameter in model.parameters()]


def copied_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", core_of(PLAIN, SOME))
def test_layers_follow_each_other_and_fetch_their_own_parameters(name: str) -> None:
    make, inputs = PLAIN[name]
    model = built(make)
    trace = trace_model(model, inputs, training=True)
    layers = [instruction.layer for instruction in trace.instructions]
    assert layers == sorted(layers)
    assert set(layers) == set(range(len(trace.layers)))
    assert len(set(names_of(trace))) == len(trace.layers)
    assert isinstance(trace.instructions[-1], Output)
    for number, instruction in enumerate(trace.instructions):
        for used in references(instruction):
            source = trace.instructions[used]
            assert used < number
            assert source.layer == instruction.layer or not isinstance(source, GetAttribute)
    assert {name for layer in trace.layers for name in layer.parameters} == {
        name for name, _ in model.named_parameters()
    }


def test_layers_are_named_after_the_modules_that_they_call() -> None:
    trace = trace_model(built(ResNet), samples(2, 8, 8), training=True)
    assert names_of(trace)[:8] == [
        "stem",
        *(f"blocks.0.{name}" for name in ("conv1", "norm1", "relu", "conv2", "norm2", "relu@2")),
        "blocks.1.conv1",
    ]
    stem, _, norm, relu = trace.layers[:4]
    assert stem.parameters == ("stem.weight", "stem.bias")
    assert [layer.kind for layer in trace.layers[:4]] == ["Conv2d", "Conv2d", "BatchNorm2d", "ReLU"]
    assert (norm.uses_batch_statistics, relu.uses_batch_statistics) == (True, False)
    assert norm.buffers == tuple(
        f"blocks.0.norm1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    )


def test_the_first_use_of_a_parameter_by_a_function_begins_a_layer() -> None:
    trace = trace_model(built(SizedGPT), PLAIN["sized gpt"][1], training=True)
    assert [(layer.name, layer.kind) for layer in trace.layers] == [
        ("embedding", "Embedding"),
        ("positions", "Embedding"),
        ("dropout", "Dropout"),
        ("qkv", "Linear"),
        ("", "function"),
        ("mix", "Linear"),
        ("norm", "LayerNorm"),
        ("embedding@2", "function"),
    ]
    assert trace.layers[4].buffers == ("mask",)
    assert trace.layers[0].parameters == trace.layers[-1].parameters == ("embedding.weight",)
    assert [layer.name for layer in trace.layers if layer.draws] == ["dropout"]


def test_what_a_module_computes_before_it_uses_its_parameter_is_in_its_layer() -> None:
    trace = trace_model(
        built(lambda: nn.Sequential(nn.Linear(6, 6), RMSNorm())), samples(6), training=True
    )
    assert names_of(trace) == ["0", "1"]
    method = next(one for one in trace.instructions if isinstance(one, CallMethod))
    assert (method.target, method.layer) == ("pow", 1)


def test_a_modules_parameters_are_each_in_the_layer_that_uses_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(6))
            self.second = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(torch.tanh(x + self.first) * self.first) * self.second

    trace = trace_model(built(lambda: Around(Scaled())), samples(6), training=True)
    assert [(layer.name, layer.parameters) for layer in trace.layers[1:3]] == [
        ("inner", ("inner.first",)),
        ("inner@2", ("inner.second",)),
    ]


def test_a_tied_parameter_has_one_name_in_all_its_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    trace = trace_model(model, samples(6).float(), training=True)
    assert [layer.parameters for layer in trace.layers] == [("0.weight",), (), ("0.weight",)]


def test_a_model_without_layers_is_one() -> None:
    trace = trace_model(nn.Sequential(), samples(6), training=True)
    assert [(layer.name, layer.kind) for layer in trace.layers] == [("", "function")]
    assert run_trace(trace, nn.Sequential(), 3) == 3


def test_draws_are_noticed_where_they_happen() -> None:
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6), nn.LSTM(6, 6, dropout=0.0)
    )
    training = trace_model(model, samples(6).float(), training=True)
    assert [layer.draws for layer in training.layers] == [False, True, False, False]
    evaluation = trace_model(model, samples(6).float(), training=False)
    assert not any(layer.draws for layer in evaluation.layers)


@pytest.mark.parametrize("name", core_of(PLAIN, SOME))
def test_nothing_is_there_that_nobody_uses(name: str) -> None:
    make, inputs = PLAIN[name]
    trace = trace_model(built(make), inputs, training=True)
    used = {index for one in trace.instructions for index in references(one)}
    for number, instruction in enumerate(trace.instructions):
        if instruction.target in (getattr, operator.getitem, operator.mul):
            assert number in used


def test_only_tensors_cross_where_sizes_are_those_of_the_inputs() -> None:
    model, inputs = built(SizedGPT), PLAIN["sized gpt"][1]
    trace = trace_model(model, inputs, training=True)
    values: dict[int, Any] = {}
    run_trace(trace, model, inputs, values.__setitem__)
    crossing = [
        values[index]
        for instruction in trace.instructions
        for index in references(instruction)
        if trace.instructions[index].layer != instruction.layer
    ]
    assert all(isinstance(value, Tensor) for value in crossing)


def test_the_number_of_samples_is_no_constant() -> None:
    trace = trace_model(built(Sizes), samples(6), training=True)
    numbers = [
        argument
        for instruction in trace.instructions
        for argument in instruction.args
        if isinstance(argument, int)
    ]
    assert NUM_SAMPLES not in numbers
    assert 2 * NUM_SAMPLES not in numbers


# --- what changes in place ------------------------------------------------------------------------


class Flow(nn.Module):
    """Changes what another layer made, by whatever function."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any], keeps: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        other = self.second(x)
        self.change(made, other)
        result: Tensor = made + other
        return result


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        (lambda made, other: made.mul_(2), True),
        (lambda made, other: made[:, 0].zero_(), True),
        (lambda made, other: made.view(-1)[:3].fill_(1), True),
        (lambda made, other: made.__setitem__(0, 1.0), True),
        (lambda made, other: torch.add(other.detach(), 1, out=made.detach()), True),
        (lambda made, other: F.relu(made, inplace=True), True),
        (lambda made, other: made.data.add_(1), True),
        (lambda made, other: made.__iadd__(1), True),
        (lambda made, other: other.mul_(2), False),
        (lambda made, other: made.clone().mul_(2), False),
        (lambda made, other: made.add(1), False),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_changes_in_place_of_what_another_layer_made_are_found(
    change: Callable[[Tensor, Tensor], Any], changes: bool, device: str
) -> None:
    model = Flow(change).to(device)
    trace = trace_model(model, samples(6).float().to(device), training=True)
    assert names_of(trace) == ["first", "second"]
    pairs = [
        tuple(trace.layers[trace.instructions[one].layer].name for one in pair)
        for pair in trace.changes
    ]
    assert sorted(set(pairs)) == ([("first", "second")] if changes else [])


def test_a_module_that_works_in_place_is_found() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
    trace = trace_model(model, samples(6).float(), training=True)
    ((maker, changer),) = trace.changes
    assert [trace.instructions[one].target for one in (maker, changer)] == ["0", "1"]


class Counted(nn.Module):
    """Two layers share a buffer, and one changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.count
        x = self.second(x)
        self.count.view(1)[0] += 1
        result: Tensor = self.third(x) * self.count
        return result


def test_a_buffer_that_one_layer_changes_and_another_reads_keeps_them_together() -> None:
    trace = trace_model(Counted(), samples(6).float(), training=True)
    layers = [[trace.instructions[one].layer for one in pair] for pair in trace.changes]
    first, second, last = [number for number, layer in enumerate(trace.layers) if layer.buffers]
    assert [first, second] in layers
    assert [first, last] in layers


def test_inputs_that_are_changed_and_read_by_others_keep_them_together() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            y: Tensor = self.second(self.first(x)) + x
            return y

    inputs = samples(6).float()
    kept = inputs.clone()
    trace = trace_model(Changed(), inputs, training=True)
    assert torch.equal(inputs, kept)
    assert any([trace.instructions[one].layer for one in pair] == [0, 1] for pair in trace.changes)


# --- what cannot be traced ------------------------------------------------------------------------


class Around(nn.Module):
    """A layer between two."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.inner = inner
        self.after = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(self.inner(self.before(x)))
        return result


class Odd(nn.Module):
    """A layer that does ``act`` to its inputs."""

    def __init__(self, act: Callable[["Odd", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act = act
        self.counter = 0
        self.seen: list[float] = []
        self.masks = [torch.ones(6, dtype=torch.float64)]
        self.running: Tensor
        self.register_buffer("running", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.linear(x))


def count(module: Odd, x: Tensor) -> Tensor:
    module.counter += 1
    return x * module.counter


def remember(module: Odd, x: Tensor) -> Tensor:
    module.seen.append(1.0)
    return x * len(module.seen)


def replace_buffer(module: Odd, x: Tensor) -> Tensor:
    module.running = 0.9 * module.running + 0.1 * x.detach().mean(0)
    return x - module.running


def catch_item(module: Odd, x: Tensor) -> Tensor:
    try:
        return x / x.detach().abs().max().item()
    except Exception:
        return x


def take_by_sample(module: Odd, x: Tensor) -> Tensor:
    return torch.stack([row * number for number, row in enumerate(x)])


def choose_by_value(module: Odd, x: Tensor) -> Tensor:
    rows = (x[:, 0] > 0).nonzero()
    return x * 2 if len(rows) > 1 else x


def repeat_by_sample(module: Odd, x: Tensor) -> Tensor:
    for _ in range(len(x)):
        x = x * 1.01
    return x


def write_and_decide(module: Odd, x: Tensor) -> Tensor:
    table = torch.zeros(2, 6, dtype=x.dtype)
    table[0] = x.detach()[0]
    return x if bool(table.sum() > 0) else -x


def set_past_the_module(module: Odd, x: Tensor) -> Tensor:
    object.__setattr__(module, "counter", module.counter + 1)
    return x * module.counter


def draw_from_own_seed(module: Odd, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return x + torch.rand(6)


def differentiate(module: Odd, x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(leaf.pow(3).sum(), leaf)
    return x * gradient


def in_low_precision(module: Odd, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(x.float(), x.float().T).to(x.dtype) @ x


SHARED = torch.full((6,), 2.0, dtype=torch.float64)

ODD: dict[str, tuple[Callable[[Odd, Tensor], Tensor], str]] = {
    "bool": (lambda module, x: x if x.sum() > 0 else -x, "values outside torch .__bool__."),
    "bool of written": (write_and_decide, "values outside torch .__bool__."),
    "item": (catch_item, "values outside torch .item."),
    "tolist": (lambda module, x: x * len(x.tolist()), "values outside torch .tolist."),
    "numpy": (
        lambda module, x: x * float(x.detach().numpy().sum()),
        "values outside torch .numpy.",
    ),
    "equal": (lambda module, x: x if torch.equal(x, x + 0) else -x, "outside torch .equal."),
    "length": (choose_by_value, "size that depends on the data"),
    "unique": (
        lambda module, x: x + sum(part for part in torch.unique(x.detach().round())),
        "as many tensors as the data says",
    ),
    "python stream": (lambda module, x: x * random.random(), "random numbers that are not torch's"),
    "numpy stream": (lambda module, x: x * np.random.rand(), "random numbers that are not torch's"),
    "attribute": (count, "changes attribute 'counter'"),
    "list": (remember, "changes its attributes"),
    "buffer": (replace_buffer, "changes attribute 'running'"),
    "list of tensors": (lambda module, x: x * module.masks[0], "no input, parameter, buffer"),
    "global tensor": (lambda module, x: x * SHARED, "no input, parameter, buffer"),
    "vmap": (lambda module, x: torch.vmap(lambda row: row * 2)(x), "no input, parameter, buffer"),
    "samples": (take_by_sample, "depends on the number of samples"),
    "repetitions": (repeat_by_sample, "depends on the number of samples"),
    "own seed": (draw_from_own_seed, "traced, its outputs differ"),
    "past setattr": (set_past_the_module, "changes its attributes"),
    "rounded": (lambda module, x: x * int(len(x) * 0.5), "depends on the number of samples"),
    "autograd": (differentiate, "calls grad|whether gradients are computed"),
    "autocast": (in_low_precision, "changes autocast"),
    "generator": (
        lambda module, x: x * torch.rand(6, generator=torch.Generator().manual_seed(1)),
        "passes on a Generator",
    ),
}


@pytest.mark.parametrize("training", core_of([True, False], [True]), ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_traced_is_one_layer_and_says_why(name: str, training: bool) -> None:
    act, reason = ODD[name]
    model = built(lambda: Around(Odd(act))).train(training)
    trace = trace_model(model, samples(6), training=training)
    assert names_of(trace) == ["before", "inner", "after"]
    (found,) = atomic_of(trace).values()
    assert re.search(reason, found)
    assert trace.layers[1].kind == "Odd"
    assert trace.layers[1].parameters == ("inner.linear.weight", "inner.linear.bias")
    if name not in ("attribute", "list", "past setattr"):
        check_equal(trace, model, samples(6, num_samples=9))


def test_numbers_that_do_not_depend_on_data_may_decide() -> None:
    def decide(module: Odd, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        return x * 2 if bool((mask == mask.tril()).all()) else x

    model = built(lambda: Around(Odd(decide)))
    trace = trace_model(model, samples(6), training=True)
    assert atomic_of(trace) == {}
    check_equal(trace, model, samples(6, num_samples=9))


def test_if_the_model_itself_cannot_be_traced_it_is_one_layer() -> None:
    model = built(lambda: Odd(ODD["bool"][0]))
    trace = trace_model(model, {"x": samples(6)}, training=True)
    assert [(layer.name, layer.kind) for layer in trace.layers] == [("", "Odd")]
    assert trace.layers[0].parameters == ("linear.weight", "linear.bias")
    assert trace.layers[0].is_atomic
    check_equal(trace, model, {"x": samples(6, num_samples=9)})


def test_gradients_that_a_trace_would_lose_are_missed() -> None:
    def double_gradient(module: Odd, x: Tensor) -> Tensor:
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda gradients: tuple(2 * one for one in gradients))
        return x

    model = built(lambda: Around(Odd(double_gradient)))
    trace = trace_model(model, samples(6), training=True)
    assert atomic_of(trace) == {"": "traced, its gradients differ"}
    check_equal(trace, model, samples(6))
    assert atomic_of(trace_model(model, samples(6), training=False)) == {}


def test_a_model_that_never_does_the_same_is_not_blamed_for_that() -> None:
    numbers = itertools.count()
    model = built(lambda: Around(Odd(lambda module, x: x * next(numbers))))
    model.inner.register_forward_pre_hook(lambda module, args: None)
    trace = trace_model(model, samples(6), training=True)
    assert atomic_of(trace) == {"inner": "has hooks"}


def test_blame_goes_up_to_where_it_can_be_dealt_with() -> None:
    class Passing(nn.Module):
        """Gives its layer what instructions cannot hold."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Taking()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x, lambda y: y * 2)
            return result

    class Taking(nn.Module):
        def forward(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
            return change(x) if x.sum() > 0 else -x

    trace = trace_model(built(lambda: Around(Passing())), samples(6), training=True)
    (found,) = atomic_of(trace).items()
    assert re.fullmatch(r"passes on a function \(test_tracing\.py:\d+\)", found[1])
    assert found[0] == "inner"


def test_modules_that_are_traced_through_lose_no_hooks() -> None:
    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        called.append(type(module).__name__)
        return output * 2

    called: list[str] = []
    model = built(lambda: Around(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))))
    model.inner[1].register_forward_hook(double)
    assert atomic_of(trace_model(model, samples(6), training=True)) == {}
    model.inner.register_forward_hook(double)
    trace = trace_model(model, samples(6), training=True)
    assert atomic_of(trace) == {"inner": "has hooks"}
    called.clear()
    run_trace(trace, model, samples(6))
    assert called == ["Linear", "Sequential"]
    check_equal(trace, model, samples(6))


def test_backward_hooks_are_hooks() -> None:
    model = built(lambda: Around(nn.Sequential(nn.Linear(6, 6))))
    model.inner.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    assert atomic_of(trace_model(model, samples(6), training=True)) == {"inner": "has hooks"}


def test_torchs_own_layers_and_those_with_parametrizations_are_called_as_a_whole() -> None:
    model = built(Attend)
    trace = trace_model(model, samples(3, 6), training=True)
    assert names_of(trace) == ["attention", "linear", "lot.a", "lot.b", "normed"]
    assert trace.layers[-1].kind == "ParametrizedLinear"
    assert atomic_of(trace) == {}


def test_kinds_of_batch_normalisation_are_called_as_a_whole() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    trace = trace_model(built(lambda: Around(Own(6))), samples(6), training=True)
    assert [(one.kind, one.uses_batch_statistics) for one in trace.layers] == [
        ("Linear", False),
        ("Own", True),
        ("Linear", False),
    ]


def test_both_modes_have_the_same_modules_in_one_piece() -> None:
    model = built(
        lambda: Around(
            Odd(lambda module, x: x * 1 if module.training else ODD["bool"][0](module, x))
        )
    )
    assert atomic_of(trace_model(model, samples(6), training=True)) == {}
    training, evaluation = trace_modes(model, samples(6))
    assert (training.training, evaluation.training) == (True, False)
    assert names_of(training) == names_of(evaluation) == ["before", "inner", "after"]


def test_both_modes_of_a_model_that_leaves_out_a_layer() -> None:
    act = ODD["bool"][0]

    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.odd = Odd(act)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return self.odd(x) if self.training else x

    training, evaluation = trace_modes(built(Auxiliary), samples(6))
    assert (names_of(training), names_of(evaluation)) == (["linear", "odd"], ["linear"])


# --- the example, and what is left as it was ------------------------------------------------------


class Stateful(nn.Module):
    """Changes everything that a module can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.odd = Odd(lambda module, x: count(module, remember(module, replace_buffer(module, x))))
        self.plain = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.plain.add_(1)
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        x = F.dropout(self.norm(self.linear(x)))
        x = x + torch.rand(6, generator=self.generator)
        drawn: Tensor = self.odd(x) * (1 + 0 * random.random() + 0 * np.random.rand())
        return drawn


def test_everything_is_left_as_it_was() -> None:
    model = built(Stateful)
    model.norm.eval()
    model.linear.bias.grad = torch.ones(6, dtype=torch.float64)
    gradient = model.linear.bias.grad
    objects = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    seed_streams(11)
    before = copy.deepcopy((model.state_dict(), model.plain, stream_states()))
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    seen, stream = list(model.odd.seen), model.generator.get_state()
    for training in (True, False):
        trace_model(model, samples(6), training=training)
    assert is_same((model.state_dict(), model.plain, stream_states()), before)
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == objects
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert all(vars(module)[key] is value for key, value in attributes[name].items())
    assert model.odd.seen == seen == []
    assert torch.equal(model.generator.get_state(), stream)
    assert model.linear.bias.grad is gradient
    assert torch.equal(gradient, torch.ones(6, dtype=torch.float64))
    assert model.linear.weight.grad is None
    assert (model.training, model.norm.training) == (True, False)
    assert torch.is_grad_enabled()
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert "len" not in globals()


def test_what_the_model_raises_is_the_users_to_see() -> None:
    model = built(lambda: Around(nn.Linear(5, 6)))
    before = pickle.dumps(model.state_dict())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trace_model(model.eval(), samples(6), training=True)
    assert not model.training
    assert pickle.dumps(model.state_dict()) == before


def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(ModelError, match="Call the model once"):
        trace_model(nn.LazyLinear(3), samples(6), training=True)


def test_a_model_for_one_number_of_samples_is_traced_for_it() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.gate = nn.Parameter(torch.ones(NUM_SAMPLES, 6))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(x) * self.gate
            return result

    model = built(Fixed)
    trace = trace_model(model, samples(6), training=True)
    assert (names_of(trace), atomic_of(trace)) == (["linear", ""], {})
    check_equal(trace, model, samples(6))


def test_inputs_of_unlike_lengths_are_fine() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            result: Tensor = self.linear(x) @ mask
            return result

    model = built(Masked)
    inputs = (samples(6), torch.ones(6, 6, dtype=torch.float64))
    check_equal(trace_model(model, inputs, training=True), model, inputs)


@pytest.mark.parametrize(
    "name",
    core_of([name for name in PLAIN if name not in ("translator", "packed", "routed")], SOME),
)
def test_a_model_on_the_meta_device_has_the_same_instructions(name: str) -> None:
    make, inputs = PLAIN[name]
    model = built(make)
    elsewhere = copy.deepcopy(model).to("meta")
    if isinstance(elsewhere, OwnParameters):
        elsewhere.offset = elsewhere.offset.to("meta")
    trace = trace_model(model, inputs, training=True)
    on_meta = trace_model(
        elsewhere, map_tensors(lambda tensor: tensor.to("meta"), inputs), training=True
    )
    assert repr(on_meta) == repr(trace)
    check_equal(on_meta, model, inputs)


def test_the_device_of_parameters_is_where_the_values_are() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            parameter = next(self.parameters())
            places = torch.arange(x.shape[1], device=parameter.device, dtype=parameter.dtype)
            result: Tensor = self.linear(x) + places
            return result

    model = built(Placed)
    trace = trace_model(copy.deepcopy(model).to("meta"), samples(6).to("meta"), training=True)
    check_equal(trace, model, samples(6))


def test_an_empty_tuple_is_a_constant() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Giver()

        def forward(self, x: Tensor) -> Any:
            x, nothing = self.inner(x)
            return x.sum(nothing) + x.sum(dim=())

    class Giver(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)

        def forward(self, input: Tensor) -> Any:
            return super().forward(input), ()

    trace = trace_model(built(Empty), samples(6), training=True, atomic={"inner": "a test"})
    sums = [one for one in trace.instructions if one.target == "sum"]
    assert [(one.args[1:], one.kwargs) for one in sums] == [(((),), {}), ((), {"dim": ()})]


def test_under_autocast_a_trace_does_what_the_model_does_there() -> None:
    model = build_seeded(SizedGPT)
    tokens = PLAIN["sized gpt"][1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace = trace_model(model, tokens, training=True)
        check_equal(trace, model, tokens)
    assert atomic_of(trace) == {}


# --- instructions are data ------------------------------------------------------------------------


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("name", core_of(PLAIN, SOME))
def test_traces_can_be_sent(name: str, pickler: Any) -> None:
    make, inputs = PLAIN[name]
    model = built(make)
    trace = trace_model(model, inputs, training=True)
    sent = pickler.dumps(trace)
    received = pickle.loads(sent)
    assert repr(received) == repr(trace)
    assert len(sent) < 20_000  # no tensor is in it
    check_equal(received, model, inputs)


def test_functions_that_are_replaced_for_a_while_are_found_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = built(lambda: Around(Odd(lambda module, x: F.relu(x))))
    trace = trace_model(model, samples(6), training=True)
    assert NamedFunction("torch.nn.functional.relu") in [one.target for one in trace.instructions]
    expected = run_trace(trace, model, samples(6))
    monkeypatch.setattr(F, "relu", lambda x, inplace: x * 0)
    assert not torch.equal(run_trace(trace, model, samples(6)), expected)


def test_references_are_found_in_all_containers() -> None:
    instruction = CallFunction(
        target=max,
        args=(Ref(3), [Ref(1), (Ref(3), {"a": Ref(5)})], slice(None, Ref(4)), Pair(Ref(7), 2)),
        kwargs={"key": Ref(0)},
        layer=0,
    )
    assert references(instruction) == (3, 1, 5, 4, 7, 0)
    assert replace(instruction, layer=1).layer == 1
