"""The manifest of a checkpoint: what its files hold, their sizes and hashes, and its own hash.

It is JSON: ``{"sha256":"...","manifest":{...}}``, where the hash is that of the bytes of the inner
object. What is read is checked to be of this form, byte by byte: whatever bit is flipped shows.
"""

import hashlib
from typing import Annotated, Any

import msgspec

from lockstep.errors import CheckpointError

NAME = "manifest.json"
VERSION = 1

# What can lead nowhere else than into the folder of the manifest.
_FileName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9-]*\.safetensors\Z", max_length=64)]
_Hash = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Size = Annotated[int, msgspec.Meta(ge=0)]

_BEGIN, _MIDDLE, _END = b'{"sha256":"', b'","manifest":', b"}\n"
_HASH_LENGTH = 64


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file with tensors.

    Attributes:
        size: in bytes.
        sha256: of all its bytes.
    """

    size: _Size
    sha256: _Hash


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor, which lies in one file as a whole: no file depends on the layout of a training.

    Attributes:
        dtype: as torch calls it: ``"float32"``.
        shape: of the whole.
        file: the name of the file.
    """

    dtype: str
    shape: tuple[_Size, ...]
    file: _FileName


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For people.

    Attributes:
        epoch: of the next step.
        step: steps made.
        is_finished: the training has come to its end.
        strategy: the Plan's; empty without one.
        num_devices: the Plan's; 0 without one.
        lockstep: the version that wrote it.
    """

    epoch: int
    step: int
    is_finished: bool
    strategy: str
    num_devices: int
    lockstep: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint consists of.

    Attributes:
        version: of this form.
        summary: for people.
        files: by name.
        tensors: by qualified name (``checkpoint.trees``).
        weights: of each name in the model's ``state_dict()``, the tensor's qualified name.
        values: the training's state, and what ``fit`` must know of itself, without the tensors.
        plan: the Plan under which it was trained, or None.
    """

    version: int = VERSION
    summary: Summary
    files: dict[_FileName, FileEntry]
    tensors: dict[str, TensorEntry]
    weights: dict[str, str]
    values: dict[str, Any]
    plan: Any


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest's file."""
    body = msgspec.json.encode(manifest)
    return _BEGIN + _hash(body) + _MIDDLE + body + _END


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in a file's bytes.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    begin = len(_BEGIN) + _HASH_LENGTH
    found, body = data[len(_BEGIN) : begin], data[begin + len(_MIDDLE) : -len(_END)]
    if data != _BEGIN + found + _MIDDLE + body + _END or found != _hash(body):
        raise _damaged("bytes that do not fit its hash")
    try:
        version = msgspec.json.decode(body, type=_Versioned).version
        if version != VERSION:
            raise _damaged(f"version {version}, where this Lockstep reads {VERSION}")
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _damaged(error) from error
    _check_names(manifest)
    return manifest


class _Versioned(msgspec.Struct):
    version: int


def _check_names(manifest: Manifest) -> None:
    for name, entry in manifest.tensors.items():
        if entry.file not in manifest.files:
            raise _damaged(f"{name!r} in a file {entry.file!r} that it does not name")
    for name, qualified in manifest.weights.items():
        if qualified not in manifest.tensors:
            raise _damaged(f"{name!r} as the tensor {qualified!r}, which it does not name")


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _damaged(received: object) -> CheckpointError:
    return CheckpointError(
        f"{NAME} of a checkpoint must be what was written.",
        received=received,
        fix="Take an older checkpoint, or another copy of this one.",
    )
