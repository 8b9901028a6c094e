"""Whatever bytes come from another host: what is read is a value, or a HostError, and small."""

import dataclasses
import tracemalloc
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comm.codec.message_codec import decode, encode
from lockstep.errors import HostError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Thing:
    part: Any


KEYS = st.one_of(st.integers(), st.text(), st.binary(), st.booleans(), st.none())
LEAVES = st.one_of(
    KEYS,
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.float32, torch.Size([3, 1])]),
    st.frozensets(KEYS, max_size=3),
    st.sets(KEYS, max_size=3),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Thing, inner),
    ),
    max_leaves=10,
)

RICH = [
    encode([torch.arange(12.0).reshape(3, 4).t(), {"a": np.arange(3), "b": (1, None, "x", 2.5)}]),
    encode([Pair(torch.tensor([True]), np.float32(1)), Thing({1, 2}), OrderedDict(a=[torch.int8])]),
    encode([np.array(["text"]), np.str_("ü"), np.datetime64(5, "s"), 1j, b"bytes", 10**30]),
    encode(torch.ones(4, 4).max(dim=1)),
]


def read(payload: bytes) -> None:
    """Read bytes that may be anything."""
    tracemalloc.start()
    try:
        decode(payload)
    except HostError as error:
        assert "cannot be decoded" in str(error) or "does not know" in str(error)  # noqa: PT017
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3_000_000 + 200 * len(payload)


def shown(tree: Any) -> str:
    """All types and values; sets in an order of their own, as theirs is not kept."""
    kind = type(tree).__name__
    if isinstance(tree, set | frozenset):
        return f"{kind} {sorted(map(repr, tree))}"
    if isinstance(tree, dict):
        return f"{kind} {[(repr(key), shown(value)) for key, value in tree.items()]}"
    if isinstance(tree, list | tuple):
        return f"{kind} {[shown(part) for part in tree]}"
    return f"{kind} {shown(tree.part)}" if isinstance(tree, Thing) else f"{kind} {tree!r}"


@given(TREES)
def test_trees_come_back(tree: Any) -> None:
    arrived = decode(encode(tree))
    assert arrived == tree
    assert shown(arrived) == shown(tree)


@given(st.binary(max_size=200))
def test_random_bytes(payload: bytes) -> None:
    read(payload)


@pytest.mark.thorough
@settings(max_examples=300)
@given(st.data())
def test_mutated_bytes(data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from(RICH)))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(payload) - 1))
        new = data.draw(st.one_of(st.binary(max_size=9), st.sampled_from(TELLING)))
        payload[position : position + data.draw(st.sampled_from([len(new), 0, 1]))] = new
    read(bytes(payload))


@given(st.data())
def test_truncated_bytes(data: st.DataObject) -> None:
    payload = data.draw(st.sampled_from(RICH))
    read(payload[: data.draw(st.integers(0, len(payload) - 1))])


TELLING = [
    *(bytes([tag]) for tag in b"iscdz([<>{tag=r"),
    *(bytes([0x90 + n]) for n in range(6)),  # lists of n in MessagePack
    *(b"\xd3" + n.to_bytes(8, signed=True) for n in (0, 1, 2, -1, 63, 2**31, 2**62, -(2**63))),
    *(tag + bytes([127] * 4) for tag in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")),
]
