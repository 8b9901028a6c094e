"""Records come out as they were sealed, or not at all."""

import contextlib
import itertools
import os
import random
from collections.abc import Iterable, Iterator

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from lockstep.channel import records, sealed_channel
from lockstep.channel.keys import Keys
from lockstep.channel.records import HEADER_BYTES, MOST_BYTES, Opener, Sealer, TamperedError
from lockstep.channel.sealed_channel import Channel
from lockstep.launch.security import handshake
from tests.channels import ANSWERER, CALLER, channel_pair, receive, send
from tests.control_groups import SECRET

KEY = bytes(range(32))
CONTENTS = st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=6)


def sealed(contents: Iterable[bytes], key: bytes = KEY) -> list[bytes]:
    sealer = Sealer(key)
    return [b"".join(sealer.seal(content)) for content in contents]


def pieces_of(stream: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    ends = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(ends):
        yield stream[start:stop]


def opened(pieces: Iterable[bytes], key: bytes = KEY) -> Iterator[bytes]:
    """The contents of a stream that comes in pieces, as a socket hands it out."""
    opener = Opener(key)
    for piece in pieces:
        while piece:
            count = min(len(piece), len(opener.room))
            opener.room[:count] = piece[:count]
            if content := opener.take_in(count):
                yield content
            piece = piece[count:]


def contents_until_refusal(stream: bytes, key: bytes = KEY) -> tuple[list[bytes], bool]:
    """What was accepted of a stream, and whether something was refused."""
    found: list[bytes] = []
    try:
        found.extend(opened([stream], key))  # which keeps what comes before the error
    except TamperedError:
        return found, True
    return found, False


@given(CONTENTS, st.lists(st.integers(0, 1000), max_size=20))
def test_records_come_out_however_the_stream_is_cut(contents: list[bytes], cuts: list[int]) -> None:
    assert list(opened(pieces_of(b"".join(sealed(contents)), cuts))) == contents


def test_the_largest_record() -> None:
    content = os.urandom(MOST_BYTES)
    assert list(opened(pieces_of(b"".join(sealed([content, b"1"])), [100_000, 7]))) == [
        content,
        b"1",
    ]


@st.composite
def mutated(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    """What was sent, and another stream that was made of it."""
    contents = draw(CONTENTS)
    parts = sealed(contents)
    stream = b"".join(parts)
    place = draw(st.integers(0, len(stream) - 1))
    number = draw(st.integers(0, len(parts) - 1))
    ways = {
        "flip": lambda: (
            stream[:place]
            + bytes([stream[place] ^ 1 << draw(st.integers(0, 7))])
            + stream[place + 1 :]
        ),
        "insert": lambda: stream[:place] + draw(st.binary(min_size=1)) + stream[place:],
        "drop bytes": lambda: stream[:place] + stream[place + draw(st.integers(1, 50)) :],
        "drop a record": lambda: b"".join(parts[:number] + parts[number + 1 :]),
        "repeat a record": lambda: b"".join(parts[: number + 1] + parts[number:]),
        "other order": lambda: b"".join(draw(st.permutations(parts))),
        "other headers": lambda: b"".join(
            part[:HEADER_BYTES] + other[HEADER_BYTES:]
            for part, other in zip(parts, draw(st.permutations(parts)), strict=True)
        ),
        "other key": lambda: b"".join(parts[:number] + sealed(contents, bytes(32))[number:]),
    }
    return contents, ways[draw(st.sampled_from(sorted(ways)))]()


@given(mutated())
def test_of_any_other_stream_only_what_came_before_is_accepted(
    case: tuple[list[bytes], bytes],
) -> None:
    contents, stream = case
    genuine = b"".join(sealed(contents))
    found, is_refused = contents_until_refusal(stream)
    assert found == contents[: len(found)]
    if len(stream) >= len(genuine) and not stream.startswith(genuine):
        assert is_refused
    if stream != genuine and len(found) == len(contents):
        assert stream.startswith(genuine)  # and nothing of the rest was accepted


@given(st.integers(0, 100), st.integers(0, 159))
def test_a_wrong_length_is_found_before_it_is_believed(size: int, bit: int) -> None:
    """Nobody waits for bytes that never come, or takes memory for them."""
    header = bytearray(sealed([bytes(size + 1)])[0][:HEADER_BYTES])
    header[bit // 8] ^= 1 << bit % 8
    assert contents_until_refusal(bytes(header)) == ([], True)


def test_after_a_refusal_nothing_is_accepted() -> None:
    parts = sealed([b"first", b"second"])
    opener = Opener(KEY)
    opener.room[:] = bytes(HEADER_BYTES)
    with pytest.raises(TamperedError):
        opener.take_in(HEADER_BYTES)
    assert len(opener.room) == 0
    assert contents_until_refusal(bytes(HEADER_BYTES) + parts[0]) == ([], True)


def test_no_two_parts_have_the_same_key_and_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_PARTS_PER_KEY", 6)
    parts = sealed([b"same"] * 20)
    assert len(set(parts)) == len(parts)
    assert list(opened(parts)) == [b"same"] * 20
    assert list(opened(parts[:3])) == [b"same"] * 3
    # After so many parts the count begins anew, with another key.
    assert contents_until_refusal(b"".join(parts[:3] + parts[:1])) == ([b"same"] * 3, True)


def test_each_direction_and_each_task_has_a_key_of_its_own() -> None:
    every = [
        key
        for keys in (CALLER, CALLER.next(), CALLER.next().next())
        for key in (keys.sending, keys.receiving)
    ]
    assert len(set(every)) == len(every)
    assert (CALLER.sending, CALLER.receiving) == (ANSWERER.receiving, ANSWERER.sending)
    assert CALLER.next().sending == ANSWERER.next().receiving
    assert repr(CALLER) == "Keys()"


def test_what_was_sent_back_or_in_another_task_is_refused() -> None:
    left, right = channel_pair()
    send(left, b"a record")
    recorded = right.socket.recv(1000)
    for victim, keys in ((left, left.keys), (right, right.keys.next())):
        other, end = channel_pair()
        other.socket.send(recorded)
        with pytest.raises(TamperedError):
            receive(Channel(end.socket, keys))
        other.close()
        end.close()
        victim.close()


def test_what_travels_cannot_be_read() -> None:
    stream = b"".join(sealed([b"known words " * 100] * 2))
    assert b"known" not in stream
    assert stream[HEADER_BYTES : len(stream) // 2] != stream[len(stream) // 2 + HEADER_BYTES :]


@pytest.mark.parametrize("seed", range(5))
def test_parts_of_all_sizes_become_records_and_come_out_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many bytes the reader takes at a time; and none is left in the channel."""
    monkeypatch.setattr(sealed_channel, "MOST_BYTES", 64)
    generator = random.Random(seed)
    sizes = [generator.choice([0, 1, 5, 63, 64, 65, 1000, 20_000]) for _ in range(60)]
    parts = [generator.randbytes(size) for size in sizes]
    left, right = channel_pair()
    left.put(*parts)
    found = b""
    is_flushed = False
    while len(found) < sum(sizes):
        is_flushed = left.flush()
        with contextlib.suppress(BlockingIOError):
            while True:
                found += right.receive(generator.choice([1, 7, 64, 5000]))
    assert found == b"".join(parts)
    assert is_flushed
    assert not left.has_unsent
    left.close()
    with pytest.raises(ConnectionError, match="closed"):
        right.receive(1)
    right.close()


def test_a_task_goes_on_with_the_keys_that_follow() -> None:
    left, right = channel_pair()
    for number in range(3):
        send(left, b"to task %d" % number)
        assert receive(right) == b"to task %d" % number
        left, right = left.renewed(), right.renewed()
    left.close()
    right.close()


def injection(generator: random.Random, own: list[bytes], others: list[bytes]) -> bytes:
    """What somebody might send who can write to a connection."""
    record = bytearray(generator.choice(own[:-1]))
    record[generator.randrange(len(record))] ^= 1 << generator.randrange(8)
    return generator.choice(
        [
            generator.randbytes(generator.randrange(HEADER_BYTES, 2000)),
            generator.choice(own[:-1]),  # once more
            generator.choice(others),  # of another connection
            generator.choice(own[-1:])[generator.randrange(1, 40) :] + bytes(HEADER_BYTES),
            bytes(record),
        ]
    )


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.thorough)])
def test_nothing_that_is_injected_is_accepted(count: int) -> None:
    generator = random.Random(count)
    others = sealed([b"of another connection"] * 4, bytes(32))
    for _ in range(count):
        own = sealed([generator.randbytes(generator.randrange(1, 500)) for _ in range(4)])
        sent = generator.randrange(1, len(own))  # records that have come before
        forged = injection(generator, own[: sent + 1], others)
        stream = b"".join([*own[:sent], forged, *own[sent:]])
        found, is_refused = contents_until_refusal(stream)
        assert is_refused
        assert len(found) == sent  # and none of what was injected


def hear(steps: handshake._Exchange, theirs: bytes) -> bytes:
    """What one side says once it has heard a greeting."""
    steps.send(theirs[:8])
    return steps.send(theirs[8:])[0]


def ended(steps: handshake._Exchange, last: bytes) -> tuple[bytes, Keys]:
    with pytest.raises(StopIteration) as end:
        steps.send(last)
    found: tuple[bytes, Keys] = end.value.value
    return found


def test_a_handshake_gives_both_ends_the_same_keys_and_never_again() -> None:
    found = []
    for _ in range(2):
        caller, answerer = (
            handshake._call_exchange(SECRET, b"p"),
            handshake._answer_exchange(SECRET, [b"p"]),
        )
        greeting, _ = next(caller)
        next(answerer)
        proofs = hear(caller, hear(answerer, greeting))
        proof, _ = answerer.send(proofs)
        ends = ended(caller, proof), ended(answerer, b"")
        assert [purpose for purpose, _ in ends] == [b"p", b"p"]
        keys, theirs = ends[0][1], ends[1][1]
        assert keys == Keys(sending=theirs.receiving, receiving=theirs.sending)
        found += [keys.sending, keys.receiving]
    assert len(set(found)) == 4


@pytest.mark.parametrize("whose", ["caller", "answerer"])
def test_a_key_that_was_exchanged_on_the_way_is_found_out(whose: str) -> None:
    """Who knows no secret and stands between the hosts cannot put in a key of his own."""

    def exchanged(greeting: bytes) -> bytes:
        return greeting[:-32] + X25519PrivateKey.generate().public_key().public_bytes_raw()

    caller, answerer = (
        handshake._call_exchange(SECRET, b"p"),
        handshake._answer_exchange(SECRET, [b"p"]),
    )
    greeting, _ = next(caller)
    next(answerer)
    theirs = hear(answerer, exchanged(greeting) if whose == "caller" else greeting)
    proofs = hear(caller, exchanged(theirs) if whose == "answerer" else theirs)
    assert answerer.send(proofs)[0] == handshake._REFUSALS[handshake.OTHER_SECRET]


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(handshake.HandshakeError, match="invalid public key"):
        handshake._key_agreement(X25519PrivateKey.generate(), bytes(72))
