"""The handshake: two processes prove to each other that they know the job's secret.

They meet over TCP, or over a Unix socket if they run on one host; there the kernel must say as well
that both run as the same user.

Four messages of fixed sizes, before anything else is read::

    caller    greeting: what this is, 32 random bytes, and an X25519 key of this one time
    answerer  greeting: the same
    caller    proofs    HMAC-SHA256 over both greetings; and over the purpose and both greetings
    answerer  proof     over the purpose and both greetings, with another key; or a refusal

The caller proves first: a caller without the secret gets random bytes, a refusal, and then a closed
connection. The first proof tells another secret from another purpose, and the refusal says
which of the two it was: so both sides know. The random bytes are new each time, so what was
recorded once proves nothing later; each direction has its own key, so what was sent to somebody
proves nothing when sent back to him. The purpose (this job's rendezvous; the third channel from
host 0 to host 1) is agreed before and never sent, so a proof counts for one thing only.

Both sides are written as talks that know no socket: each step says what to send and how many bytes
to wait for. ``Gate`` holds many of them at a time, so that one who is slow keeps nobody waiting.

What follows on the connection is sealed (``lockstep.channel``), with keys that come of the secret,
of what the two X25519 keys have in common, and of all that the proofs are about. So nobody
between the hosts can read or change it, and a recording cannot be read by somebody who learns the
secret later.
"""

import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Collection, Generator
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from lockstep.channel.keys import Keys
from lockstep.channel.polling import LookAround, Stopwatch, wait_for
from lockstep.channel.sealed_channel import Channel
from lockstep.launch.security.secret import Secret
from lockstep.launch.sockets import SocketAddress, connect, tune
from lockstep.launch.workers.process_state import pid_of, user_of

_MAGIC = b"LOCKSTP3"
_NONCE_BYTES = 32
_PUBLIC_KEY_BYTES = 32
_GREETING_BYTES = len(_MAGIC) + _NONCE_BYTES + _PUBLIC_KEY_BYTES
_PROOF_BYTES = 32
_CALLER, _ANSWERER = b"lockstep caller 3", b"lockstep answerer 3"
_KNOWER, _SEALER = b"lockstep knower 3", b"lockstep sealer 3"

OTHER_PROTOCOL = "it does not speak Lockstep's protocol, or another version of it"
OTHER_SECRET = "it has another secret than this host"
OTHER_JOB = "it is of another job, with the same secret"
NO_SECRET = "it cannot prove that it knows the secret"
_TOO_SLOW = "it did not finish the handshake in time"
_REFUSALS = {
    text: hashlib.sha256(b"lockstep refusal 3: " + text.encode()).digest()
    for text in (OTHER_SECRET, OTHER_JOB)
}

# A whole handshake takes three times the way there and back.
HANDSHAKE_SECONDS = 10.0
_MOST_PENDING = 128
_MOST_ACCEPTED_AT_ONCE = 64

# Yields (what to send, how many bytes to wait for), is sent those; returns the purpose, and the
# keys for what follows.
_Talk = Generator[tuple[bytes, int], bytes, tuple[bytes, Keys]]


class HandshakeError(Exception):
    """The other side does not belong to this job."""


def purpose_of(*parts: bytes | str | int) -> bytes:
    """What a connection is for, as bytes that no other parts give."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(struct.pack("!Q", len(part)) + part for part in encoded)


def _proof(secret: Secret, role: bytes, purpose: bytes, caller: bytes, answerer: bytes) -> bytes:
    message = purpose_of(purpose, caller, answerer)
    return hmac.digest(secret.key(role), message, "sha256")


def _greeting(key: X25519PrivateKey) -> bytes:
    return _MAGIC + os.urandom(_NONCE_BYTES) + key.public_key().public_bytes_raw()


def _their_greeting(own: bytes) -> Generator[tuple[bytes, int], bytes, bytes]:
    """Send this side's, if it is time, and hear the other's."""
    magic = yield own, len(_MAGIC)
    if magic != _MAGIC:  # told at once, be the rest as long as it may
        raise HandshakeError(OTHER_PROTOCOL)
    return magic + (yield b"", _GREETING_BYTES - len(_MAGIC))


def _shared(key: X25519PrivateKey, greeting: bytes) -> bytes:
    """The X25519 secret of this side's key and the other's."""
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(greeting[-_PUBLIC_KEY_BYTES:]))
    except ValueError as error:  # of few that are no keys
        raise HandshakeError("it sent what is no key") from error


def _material(
    secret: Secret, purpose: bytes, caller: bytes, answerer: bytes, shared: bytes
) -> bytes:
    """What the keys for all that follows are made of."""
    message = purpose_of(purpose, caller, answerer, shared)
    return hmac.digest(secret.key(_SEALER), message, "sha256")


def _call(secret: Secret, purpose: bytes) -> _Talk:
    key = X25519PrivateKey.generate()
    caller = _greeting(key)
    answerer = yield from _their_greeting(caller)
    proofs = [_proof(secret, _KNOWER, b"", caller, answerer)]
    proofs += [_proof(secret, _CALLER, purpose, caller, answerer)]
    theirs = yield b"".join(proofs), _PROOF_BYTES
    if hmac.compare_digest(theirs, _proof(secret, _ANSWERER, purpose, caller, answerer)):
        material = _material(secret, purpose, caller, answerer, _shared(key, answerer))
        return purpose, Keys.agreed(material, is_caller=True)
    refusals = {answer: text for text, answer in _REFUSALS.items()}
    raise HandshakeError(refusals.get(theirs, NO_SECRET))


def _answer(secret: Secret, purposes: Collection[bytes]) -> _Talk:
    caller = yield from _their_greeting(b"")
    key = X25519PrivateKey.generate()
    answerer = _greeting(key)
    proofs = yield answerer, 2 * _PROOF_BYTES
    known, theirs = proofs[:_PROOF_BYTES], proofs[_PROOF_BYTES:]
    refusal = OTHER_SECRET
    if hmac.compare_digest(known, _proof(secret, _KNOWER, b"", caller, answerer)):
        refusal = OTHER_JOB
        for purpose in purposes:
            if hmac.compare_digest(theirs, _proof(secret, _CALLER, purpose, caller, answerer)):
                material = _material(secret, purpose, caller, answerer, _shared(key, caller))
                yield _proof(secret, _ANSWERER, purpose, caller, answerer), 0
                return purpose, Keys.agreed(material, is_caller=False)
    yield _REFUSALS[refusal], 0
    raise HandshakeError(refusal)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """A connection whose other end has proved that it knows the secret, and its purpose."""

    channel: Channel
    purpose: bytes


class _Conversation:
    """A talk over a socket, without waiting."""

    def __init__(self, sock: socket.socket, talk: _Talk) -> None:
        self.socket = sock
        self._talk = talk
        self._received = bytearray()
        self._unsent, self._num_wanted = next(talk)
        self._admission: Admission | None = None  # once the handshake is done

    @property
    def events(self) -> int:
        """What to poll for."""
        return select.POLLOUT if self._unsent else select.POLLIN

    def advance(self) -> Admission | None:
        """Go on as far as possible without waiting; the admission, once the handshake is done.

        Raises:
            HandshakeError: the other side failed it.
            OSError: the connection broke.
        """
        try:
            while self._admission is None:
                self._step()
        except BlockingIOError:
            return None
        return self._admission

    def _step(self) -> None:
        while self._unsent:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        while len(self._received) < self._num_wanted:
            # No byte more: what comes after the handshake is not ours to read.
            data = self.socket.recv(self._num_wanted - len(self._received))
            if not data:
                raise HandshakeError("it closed the connection in the handshake")
            self._received += data
        try:
            self._unsent, self._num_wanted = self._talk.send(bytes(self._received))
        except StopIteration as end:
            purpose, keys = end.value
            self._admission = Admission(channel=Channel(self.socket, keys), purpose=purpose)
        self._received.clear()


def call(
    family: int,
    where: SocketAddress,
    secret: Secret,
    purpose: bytes,
    *,
    seconds: float,
    look_around: LookAround,
) -> Channel:
    """Connect to a process that must know the secret, too.

    Args:
        family: of the address.
        where: the address.
        secret: what both know.
        purpose: what the connection is for; the other side must expect just that.
        seconds: for connecting, and again for the handshake.
        look_around: called every 20 ms.

    Raises:
        HandshakeError: there is somebody else.
        OSError: there is nobody.
    """
    sock = connect(family, where, seconds, look_around)
    return introduce(sock, secret, purpose, seconds=seconds, look_around=look_around)


def introduce(
    sock: socket.socket,
    secret: Secret,
    purpose: bytes,
    *,
    seconds: float,
    look_around: LookAround,
) -> Channel:
    """The caller's side of the handshake on a connection, which is closed if it fails.

    Raises:
        HandshakeError, OSError: as of ``call``.
    """
    watch = Stopwatch()
    try:
        _check_user(sock)
        conversation = _Conversation(sock, _call(secret, purpose))
        while (admission := conversation.advance()) is None:
            wait_for(sock, conversation.events, watch, look_around)
            if watch.tick() > seconds:
                raise HandshakeError(_TOO_SLOW)
    except BaseException:
        sock.close()
        raise
    return admission.channel


def _check_user(sock: socket.socket) -> None:
    """Refuse the other end of a Unix socket before a word if it is another user's."""
    if sock.family == socket.AF_UNIX and user_of(sock) != os.geteuid():
        raise HandshakeError("it runs as another user")


class Gate:
    """Runs the handshakes of all connections to a listener, and admits those that succeed.

    A bounded number at a time, each for a bounded time. When more come, the oldest is refused: a
    process of this job takes milliseconds, and would call again.

    Args:
        listener: a listening socket; the gate closes it.
        secret: what admissions must know.
        purposes: what connections may be for.
        once: each purpose is good for one connection only.
        seconds: for one handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        purposes: Collection[bytes],
        *,
        once: bool = False,
        seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self.purposes = set(purposes)
        self._once = once
        self._seconds = seconds
        self.num_refused = 0
        self.last_refusal = ""
        self._pending: dict[int, tuple[_Conversation, float]] = {}  # the oldest first
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)

    @property
    def address(self) -> SocketAddress:
        """Where it listens."""
        address: SocketAddress = self._listener.getsockname()
        return address

    def admit(self, seconds: float) -> list[Admission]:
        """Go on with all handshakes, waiting at most so long for something to do."""
        admissions: list[Admission] = []
        for descriptor, _ in self._poller.poll(seconds * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._pending:  # unless one who came now took its place
                admissions += self._advance(descriptor)
        now = time.monotonic()
        while self._pending and next(iter(self._pending.values()))[1] < now:
            self._refuse_oldest(_TOO_SLOW)
        return admissions

    def close(self) -> None:
        """Stop listening, and break off all handshakes."""
        self._listener.close()
        for conversation, _ in self._pending.values():
            conversation.socket.close()
        self._pending.clear()

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED_AT_ONCE):
            if len(self._pending) >= _MOST_PENDING:
                self._refuse_oldest("too many others came")
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it broke before it was accepted; or out of descriptors
                self._count_refusal(error.strerror or str(error), "a connection")
                return
            try:
                _check_user(sock)
            except HandshakeError as error:
                self._count_refusal(str(error), _peer_address(sock))
                sock.close()
                continue
            deadline = time.monotonic() + self._seconds
            conversation = _Conversation(tune(sock), _answer(self._secret, self.purposes))
            self._pending[sock.fileno()] = (conversation, deadline)
            self._poller.register(sock, conversation.events)

    def _advance(self, descriptor: int) -> list[Admission]:
        conversation, _ = self._pending[descriptor]
        try:
            admission = conversation.advance()
            if admission is None:
                self._poller.modify(descriptor, conversation.events)
                return []
        except HandshakeError as error:
            self._refuse(descriptor, str(error))
            return []
        except OSError as error:
            self._refuse(descriptor, error.strerror or str(error))
            return []
        return self._welcome(descriptor, admission)

    def _welcome(self, descriptor: int, admission: Admission) -> list[Admission]:
        if admission.purpose not in self.purposes:
            self._refuse(descriptor, "its place was taken")
            return []
        if self._once:
            self.purposes.discard(admission.purpose)
        self._forget(descriptor)
        return [admission]

    def _refuse_oldest(self, why: str) -> None:
        self._refuse(next(iter(self._pending)), why)

    def _refuse(self, descriptor: int, why: str) -> None:
        conversation = self._forget(descriptor)
        self._count_refusal(why, _peer_address(conversation.socket))
        conversation.socket.close()

    def _forget(self, descriptor: int) -> _Conversation:
        self._poller.unregister(descriptor)
        return self._pending.pop(descriptor)[0]

    def _count_refusal(self, why: str, who: str) -> None:
        self.num_refused += 1
        self.last_refusal = f"{who}: {why}"


def _peer_address(sock: socket.socket) -> str:
    try:
        if sock.family == socket.AF_UNIX:
            return f"process {pid_of(sock)}"
        return str(sock.getpeername()[0])
    except OSError:  # gone already
        return "a connection"
