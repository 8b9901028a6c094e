"""The handshake: two processes prove to each other that they know the job's secret.

They are connected by TCP, or by a Unix socket if they run on one host; then the kernel must also
say that both run as the same user.

Four messages of fixed sizes, before anything else is read::

    caller    greeting: the protocol, 32 random bytes, and an X25519 key for this connection
    answerer  greeting: the same
    caller    proofs    HMAC-SHA256 over both greetings; and over the purpose and both greetings
    answerer  proof     over the purpose and both greetings, with another key; or a refusal

The caller proves first: a caller without the secret gets random bytes, a refusal, and a closed
connection. The first proof distinguishes another secret from another purpose, and the refusal says
which of the two differs, so both sides know. The random bytes are new each time, so a replayed
recording proves nothing; each direction has its own key, so a reflected message proves nothing. The
purpose (this job's rendezvous; the third channel from host 0 to host 1) is agreed before and never
sent, so a proof is valid for one purpose only.

Both sides are generators without a socket: each step yields the bytes to send and the number of
bytes to wait for. ``Gate`` runs many handshakes at a time, so that a slow one delays no other.

What follows on the connection is sealed (``lockstep.channel``), with keys derived from the secret,
the X25519 key agreement, and the messages under the proofs. So no third party can read or change
it, and a recording stays unreadable for someone who learns the secret later (forward secrecy).
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
_SECRET_PROOF, _CHANNEL_KEYS = b"lockstep knower 3", b"lockstep sealer 3"

OTHER_PROTOCOL = "it does not speak Lockstep's protocol, or speaks another version of it"
OTHER_SECRET = "it has another secret than this host"
OTHER_JOB = "it belongs to another job, with the same secret"
NO_SECRET = "it cannot prove that it knows the secret"
_TOO_SLOW = "it did not finish the handshake in time"
_REFUSALS = {
    text: hashlib.sha256(b"lockstep refusal 3: " + text.encode()).digest()
    for text in (OTHER_SECRET, OTHER_JOB)
}

# A whole handshake takes three round trips.
HANDSHAKE_SECONDS = 10.0
_MOST_PENDING = 128
_MOST_ACCEPTED_AT_ONCE = 64

# Yields (bytes to send, number of bytes to wait for), is sent the received bytes; returns the
# purpose, and the keys for the channel.
_Exchange = Generator[tuple[bytes, int], bytes, tuple[bytes, Keys]]


class HandshakeError(Exception):
    """The other side does not belong to this job.

    Attributes:
        peer: the address or process at the other end of a call, for messages.
    """

    peer = ""


def purpose_of(*parts: bytes | str | int) -> bytes:
    """A connection's purpose as bytes, which differ for different parts."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(struct.pack("!Q", len(part)) + part for part in encoded)


def _proof(secret: Secret, role: bytes, purpose: bytes, caller: bytes, answerer: bytes) -> bytes:
    message = purpose_of(purpose, caller, answerer)
    return hmac.digest(secret.key(role), message, "sha256")


def _greeting(key: X25519PrivateKey) -> bytes:
    return _MAGIC + os.urandom(_NONCE_BYTES) + key.public_key().public_bytes_raw()


def _exchange_greetings(own: bytes) -> Generator[tuple[bytes, int], bytes, bytes]:
    """Send this side's greeting, unless it is empty, and return the other's."""
    magic = yield own, len(_MAGIC)
    if magic != _MAGIC:  # raised before the rest arrives
        raise HandshakeError(OTHER_PROTOCOL)
    return magic + (yield b"", _GREETING_BYTES - len(_MAGIC))


def _key_agreement(key: X25519PrivateKey, greeting: bytes) -> bytes:
    """The X25519 secret of this side's key and the other's."""
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(greeting[-_PUBLIC_KEY_BYTES:]))
    except ValueError as error:
        raise HandshakeError("it sent an invalid public key") from error


def _key_material(
    secret: Secret, purpose: bytes, caller: bytes, answerer: bytes, shared: bytes
) -> bytes:
    """The material from which the channel's keys are derived."""
    message = purpose_of(purpose, caller, answerer, shared)
    return hmac.digest(secret.key(_CHANNEL_KEYS), message, "sha256")


def _call_exchange(secret: Secret, purpose: bytes) -> _Exchange:
    key = X25519PrivateKey.generate()
    caller = _greeting(key)
    answerer = yield from _exchange_greetings(caller)
    proofs = [_proof(secret, _SECRET_PROOF, b"", caller, answerer)]
    proofs += [_proof(secret, _CALLER, purpose, caller, answerer)]
    their_proof = yield b"".join(proofs), _PROOF_BYTES
    if hmac.compare_digest(their_proof, _proof(secret, _ANSWERER, purpose, caller, answerer)):
        material = _key_material(secret, purpose, caller, answerer, _key_agreement(key, answerer))
        return purpose, Keys.agreed(material, is_caller=True)
    refusals = {answer: text for text, answer in _REFUSALS.items()}
    raise HandshakeError(refusals.get(their_proof, NO_SECRET))


def _answer_exchange(secret: Secret, purposes: Collection[bytes]) -> _Exchange:
    caller = yield from _exchange_greetings(b"")
    key = X25519PrivateKey.generate()
    answerer = _greeting(key)
    proofs = yield answerer, 2 * _PROOF_BYTES
    secret_proof, their_proof = proofs[:_PROOF_BYTES], proofs[_PROOF_BYTES:]
    refusal = OTHER_SECRET
    if hmac.compare_digest(secret_proof, _proof(secret, _SECRET_PROOF, b"", caller, answerer)):
        refusal = OTHER_JOB
        for purpose in purposes:
            if hmac.compare_digest(their_proof, _proof(secret, _CALLER, purpose, caller, answerer)):
                material = _key_material(
                    secret, purpose, caller, answerer, _key_agreement(key, caller)
                )
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
    """One side of a handshake over a socket, without waiting."""

    def __init__(self, sock: socket.socket, exchange: _Exchange) -> None:
        self.socket = sock
        self._exchange = exchange
        self._received = bytearray()
        self._unsent, self._num_wanted = next(exchange)
        self._admission: Admission | None = None

    @property
    def events(self) -> int:
        """The events to poll for."""
        return select.POLLOUT if self._unsent else select.POLLIN

    def advance(self) -> Admission | None:
        """Continue without waiting; returns the admission when the handshake is complete.

        Raises:
            HandshakeError: the other side failed the handshake.
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
            # No byte more: the channel reads what comes after the handshake.
            data = self.socket.recv(self._num_wanted - len(self._received))
            if not data:
                raise HandshakeError("it closed the connection during the handshake")
            self._received += data
        try:
            self._unsent, self._num_wanted = self._exchange.send(bytes(self._received))
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
        secret: the job's.
        purpose: of the connection; the other side must expect the same.
        seconds: for connecting, and again for the handshake.
        look_around: called every 20 ms.

    Raises:
        HandshakeError: the process there does not belong to this job.
        OSError: no process answers there.
    """
    sock = connect(family, where, seconds, look_around)
    watch = Stopwatch()
    try:
        _check_user(sock)
        conversation = _Conversation(sock, _call_exchange(secret, purpose))
        while (admission := conversation.advance()) is None:
            wait_for(sock, conversation.events, watch, look_around)
            if watch.tick() > seconds:
                raise HandshakeError(_TOO_SLOW)
    except BaseException as error:
        if isinstance(error, HandshakeError):
            error.peer = _peer_address(sock)
        sock.close()
        raise
    return admission.channel


def _check_user(sock: socket.socket) -> None:
    """Raise HandshakeError if another user's process is at the other end of a Unix socket."""
    if sock.family == socket.AF_UNIX and user_of(sock) != os.geteuid():
        raise HandshakeError("it runs as another user")


class Gate:
    """Runs the handshakes of all connections to a listener, and admits those that succeed.

    The number of handshakes and the time of each are limited. If more connections arrive, the
    oldest is refused: a process of this job needs milliseconds, and would call again.

    Args:
        listener: a listening socket; the gate closes it.
        secret: the job's.
        purposes: the accepted purposes of connections.
        once: accept each purpose for one connection only.
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
        """The listener's address."""
        address: SocketAddress = self._listener.getsockname()
        return address

    def admit(self, seconds: float) -> list[Admission]:
        """Continue all handshakes; waits at most so many seconds for input."""
        admissions: list[Admission] = []
        for descriptor, _ in self._poller.poll(seconds * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._pending:  # unless a new connection displaced it
                admissions += self._advance(descriptor)
        now = time.monotonic()
        while self._pending and next(iter(self._pending.values()))[1] < now:
            self._refuse_oldest(_TOO_SLOW)
        return admissions

    def close(self) -> None:
        """Stop listening, and close the connections of all handshakes."""
        self._listener.close()
        for conversation, _ in self._pending.values():
            conversation.socket.close()
        self._pending.clear()

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED_AT_ONCE):
            if len(self._pending) >= _MOST_PENDING:
                self._refuse_oldest("too many other connections arrived")
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it was reset before it was accepted; or out of descriptors
                self._count_refusal(error.strerror or str(error), "a connection")
                return
            try:
                _check_user(sock)
            except HandshakeError as error:
                self._count_refusal(str(error), _peer_address(sock))
                sock.close()
                continue
            deadline = time.monotonic() + self._seconds
            conversation = _Conversation(tune(sock), _answer_exchange(self._secret, self.purposes))
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
        return self._admit(descriptor, admission)

    def _admit(self, descriptor: int, admission: Admission) -> list[Admission]:
        if admission.purpose not in self.purposes:
            self._refuse(descriptor, "another connection has taken its place")
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
    except OSError:  # it is closed
        return "a connection"
