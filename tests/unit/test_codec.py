"""What hosts send each other arrives as it was, and only what can be sent is sent."""

import collections
import dataclasses
import math
import re
import sys
import tracemalloc
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from lockstep.comm.codec.message_codec import decode, encode
from lockstep.errors import HostError, ShippingError


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    """Neither ``__init__`` nor a property may run when one arrives."""

    first: Any
    second: Any = None

    def __post_init__(self) -> None:
        calls.append("__post_init__")

    @property
    def third(self) -> Any:
        return self.__dict__.get("third")

    @third.setter
    def third(self, value: Any) -> None:
        calls.append("third")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    only: Any


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """Like the outputs of Hugging Face's models: a dict, a dataclass, items that are attributes."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        calls.append("__post_init__")
        self.update({name: value for name, value in vars(self).items() if value is not None})

    def __setitem__(self, key: str, value: Any) -> None:
        calls.append("__setitem__")
        super().__setitem__(key, value)


class Outer:
    class Inner(NamedTuple):
        value: int


calls: list[str] = []


def test_plain_values_keep_kind_and_value() -> None:
    values: list[Any] = [
        None,
        True,
        False,
        *(0, 1, -1, 127, 128, -128, -129, 10**100, -(10**100)),
        *(0.0, -0.0, 1.5, math.inf, -math.inf),
        1 + 2j,
        *("", "ü", "\udc80"),
        *(b"", b"\0x"),
        *((), (1,), (1, (2, [3]))),
        *([], [None, "a"]),
        *({}, {"b": 1, "a": 2, 3: None, (1, 2): {}}),
        *(set(), {1, 2}, frozenset({"a", frozenset()})),
        torch.float32,
        torch.bfloat16,
        torch.Size([2, 0]),
        torch.Size([]),
    ]
    arrived = decode(encode(values))
    assert arrived == values
    assert [type(value) for value in arrived] == [type(value) for value in values]
    assert list(arrived[values.index({"b": 1, "a": 2, 3: None, (1, 2): {}})]) == [
        "b",
        "a",
        3,
        (1, 2),
    ]
    assert math.copysign(1, arrived[values.index(1.5) - 1]) == -1
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[1:3, 2:4],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(10)[::2],
        torch.tensor(3),
        torch.empty(0, 3),
        torch.empty(3, 0, dtype=torch.int16),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(5).to(torch.float16),
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(5, dtype=torch.complex64).conj().imag,
        torch.tensor([2**63 - 1]),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.nn.Parameter(torch.randn(2)),
        torch.randn(2, 1, 3).as_strided((2, 1, 3), (3, 17, 1)),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_tensors_keep_dtype_bits_and_strides(tensor: torch.Tensor) -> None:
    arrived = decode(encode([tensor]))[0]
    assert type(arrived) is torch.Tensor
    assert arrived.dtype == tensor.dtype
    assert arrived.shape == tensor.shape
    assert not arrived.requires_grad
    plain = tensor.detach().resolve_conj().resolve_neg()
    assert bits(arrived) == bits(plain)
    is_dense = tensor.numel() == len(set(offsets(tensor))) == span(tensor)
    assert arrived.stride() == (tensor.stride() if is_dense else plain.contiguous().stride())
    arrived.zero_()  # memory of its own, which can be written


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def offsets(tensor: torch.Tensor) -> list[int]:
    """Where the elements of a small tensor lie."""
    numbers = torch.arange(span(tensor)) if tensor.numel() else torch.empty(0, dtype=torch.long)
    return numbers.as_strided(tensor.shape, tensor.stride()).flatten().tolist()


def span(tensor: torch.Tensor) -> int:
    """How many elements there are from the first to the last in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::-2],
        np.array(5, dtype=np.int8),
        np.zeros((0, 3), dtype=np.float16),
        np.array([True, False]),
        np.array(["a", "longer"]),
        np.array([b"a", b"longer"]),
        np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"),
        np.array([5], dtype="timedelta64[25s]"),
        np.array([1 + 2j]),
        np.array([1, 2], dtype=">i4"),
    ],
    ids=lambda array: f"{array.dtype.str}-{array.shape}",
)
def test_arrays_keep_dtype_values_and_order(array: Any) -> None:
    arrived = decode(encode(array))
    assert type(arrived) is np.ndarray
    assert arrived.dtype == array.dtype
    assert arrived.shape == array.shape
    np.testing.assert_array_equal(arrived, array)
    assert arrived.flags.f_contiguous or not array.flags.f_contiguous
    arrived[...] = arrived


@pytest.mark.parametrize(
    "scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("ü"), np.datetime64(5, "s")]
)
def test_numpy_scalars(scalar: Any) -> None:
    arrived = decode(encode(scalar))
    assert arrived == scalar
    assert type(arrived) is type(scalar)


def test_a_memory_map_arrives_as_an_array(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "array", dtype=np.int32, mode="w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    assert decode(encode(mapped)).tolist() == [1, 2, 3]


def test_what_occurs_twice_is_one_again() -> None:
    tensor, array = torch.randn(1000), np.arange(1000)
    sent = encode({"a": tensor, "b": [tensor, array], "c": array, "d": tensor.clone()})
    assert len(sent) < 2.5 * (tensor.nbytes + array.nbytes)
    arrived = decode(sent)
    assert arrived["a"] is arrived["b"][0]
    assert arrived["b"][1] is arrived["c"]
    assert arrived["d"] is not arrived["a"]


def test_records_are_put_together_without_running_their_code() -> None:
    record = Record(torch.ones(2), Point(1, [2]))
    record.__dict__["third"] = "by the back door"
    output = Output(logits=torch.ones(3))
    calls.clear()
    sent = encode([record, Slotted(5), output, Outer.Inner(7)])
    arrived, slotted, arrived_output, inner = decode(sent)
    assert calls == []
    assert type(arrived) is Record
    assert torch.equal(arrived.first, record.first)
    assert arrived.second == Point(1, [2])
    assert type(arrived.second) is Point
    assert arrived.__dict__["third"] == "by the back door"
    assert slotted == Slotted(5)
    assert type(arrived_output) is Output
    assert list(arrived_output) == ["logits"]
    assert arrived_output.loss is None
    assert arrived_output["logits"] is arrived_output.logits
    assert inner == Outer.Inner(7)
    assert type(inner) is Outer.Inner


def test_kinds_of_dicts() -> None:
    plain: defaultdict[str, list[int]] = defaultdict(list, a=[1])
    dicts = [plain, OrderedDict(b=1, a=2), collections.Counter("hello")]
    arrived = decode(encode(dicts))
    assert arrived == dicts
    assert [type(each) for each in arrived] == [type(each) for each in dicts]
    assert arrived[0]["new"] == []
    assert list(arrived[1]) == ["b", "a"]


def test_what_torch_returns() -> None:
    highest = torch.randn(3, 4).max(dim=1)
    arrived = decode(encode(highest))
    assert type(arrived) is type(highest)
    assert torch.equal(arrived.indices, highest.indices)


class Loose:
    pass


class Failing(NamedTuple):
    value: int


def derived() -> Any:
    class Made(Failing):
        pass

    return Made(1)


def local() -> Any:
    class Local(NamedTuple):
        value: int

    return Local(1)


def circular() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Loose, r"test_codec\.Loose"),
        (lambda: len, "builtin_function_or_method"),
        (lambda: Loose, r"a builtins\.type\."),
        (lambda: type("Made", (list,), {})(), "Made"),
        (derived, "Made"),
        (local, r"<locals>\.Local"),
        (lambda: ValueError("no record"), "ValueError"),
        (lambda: np.array([object()]), "dtype object"),
        (lambda: np.zeros(1, dtype=[("a", "f4")]), "dtype"),
        (lambda: np.ma.masked_array([1], mask=[True]), "MaskedArray"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.empty(2, device="meta"), "on meta"),
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            r"torch\.Tensor",
            marks=pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
        ),
        (lambda: torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})), "Own"),
        (lambda: defaultdict(lambda: 3, a=1), "default_factory"),
        (lambda: {Slotted(1): 2}, r"Slotted as a key"),
        (circular, "nested more than 100 deep"),
    ],
)
def test_what_cannot_be_sent_is_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ShippingError, match=named):
        encode({"output": [make()]})


def test_a_class_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = encode(Failing(1))
    monkeypatch.delattr(sys.modules[__name__], "Failing")
    with pytest.raises(HostError, match=r"does not know.*'Failing'"):
        decode(sent)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("subprocess", "Popen"),
        ("antigravity", "Record"),  # nobody has imported it, and nobody may
        (__name__, "Loose"),
        (__name__, "Record.__init__"),
        (__name__, "calls"),
        ("torch.nn.modules.linear", "Linear"),
        ("", "Record"),
        (1, 2),
    ],
)
def test_names_of_what_is_no_record_are_refused(module: Any, name: Any) -> None:
    with pytest.raises(HostError):
        decode(message(["r", module, name, None, ["{"]]))
    assert "antigravity" not in sys.modules


def test_a_modules_getattr_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    asked: list[str] = []
    monkeypatch.setattr(module, "__getattr__", asked.append, raising=False)
    with pytest.raises(HostError):
        decode(message(["r", __name__, "Absent", None, ["{"]]))
    assert asked == []


def message(head: Any, *buffers: bytes) -> bytes:
    """What a host could send that does not keep to ``encode``."""
    return framed(msgspec.msgpack.encode(head), *buffers)


def framed(head: bytes, *buffers: bytes) -> bytes:
    return len(head).to_bytes(8, "little") + head + b"".join(buffers)


@pytest.mark.parametrize(
    "forged",
    [
        *(framed(tag + b"\x7f\xff\xff\xff") for tag in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")),
        (2**60).to_bytes(8, "little") + b"\xc0",
        framed(b"\xc0") + b"more",
        framed(b""),
        framed(b"\x91" * 5000 + b"\xc0"),
        b"",
        message({}),
        message(msgspec.msgpack.Ext(1, b"")),
        message([]),
        message(["?"]),
        message(["[", {}]),
        message(["i", "0xg"]),
        message(["s", b"\xff"]),
        message(["c", 1]),
        message(["<", ["["]]),
        message(["{", [["["], None]]),
        message(["{", [1, 2, 3]]),
        message(["d", "float99"]),
        message(["z", 2.5]),
        message(["z", *range(65)]),
        message(["=", 0]),
        message(["t", "float32", [2**40], [1]], bytes(8)),
        message(["t", "float32", [2**40], [0]], bytes(8)),
        message(["t", "float32", [2.0], [1]], bytes(8)),
        message(["t", "float32", [-1], [1]], bytes(8)),
        message(["t", "float32", [2], [1]], bytes(9)),
        message(["t", "qint8", [2], [1]], bytes(2)),
        message(["a", "<f8", [2**40], False], bytes(8)),
        message(["a", "|O8", [1], False], bytes(8)),
        message(["a", "<U0", [0], False]),
        message(["a", "<f8", [True], False], bytes(8)),
    ],
)
def test_forged_bytes_are_refused_without_taking_memory(forged: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(HostError, match="cannot be decoded"):
            decode(forged)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_messages_about_forged_bytes_are_short() -> None:
    with pytest.raises(HostError, match="does not know") as caught:
        decode(message(["r", "m" * 100_000, "n", None, ["{"]]))
    assert len(str(caught.value)) < 600
    assert re.search("mmm", str(caught.value))


def test_large_tensors_are_copied_once_on_each_side() -> None:
    tensor = torch.zeros(10_000_000)
    tracemalloc.start()
    try:
        sent = encode([tensor])
        assert tracemalloc.get_traced_memory()[1] < 1.1 * tensor.nbytes
        tracemalloc.reset_peak()
        arrived = decode(memoryview(sent))
        assert tracemalloc.get_traced_memory()[1] < 1.1 * tensor.nbytes  # torch's own is not traced
    finally:
        tracemalloc.stop()
    assert torch.equal(arrived[0], tensor)
