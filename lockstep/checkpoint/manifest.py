"""The manifest of a checkpoint: the contents, sizes and hashes of its files, and its own hash.

It is JSON: ``{"sha256":"...","manifest":{...}}``, where the hash is that of the bytes of the inner
object. A reader checks this form byte by byte: any flipped bit is detected.
"""

import hashlib
from typing import Annotated, Any

import msgspec

from lockstep.errors import CheckpointError

NAME = "manifest.json"
VERSION = 1

# Names that cannot lead out of the folder of the manifest.
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
    """A tensor, which is in one file as a whole: files do not depend on a training's layout.

    Attributes:
        dtype: torch's name: ``"float32"``.
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
        is_finished: the training has ended.
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
    """The contents of a checkpoint.

    Attributes:
        version: of this format.
        summary: for people.
        files: by name.
        tensors: by qualified name (``checkpoint.trees``).
        weights: for each name in the model's ``state_dict()``, the tensor's qualified name.
        values: the training's state and the record of its ``fit``, without the tensors.
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
        raise _damaged("bytes that do not match its hash")
    try:
        version = msgspec.json.decode(body, type=_Versioned).version
        if version != VERSION:
            raise _damaged(f"version {version}; this Lockstep reads {VERSION}")
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
            raise _damaged(f"{name!r} in a file {entry.file!r} that it does not list")
    for name, qualified in manifest.weights.items():
        if qualified not in manifest.tensors:
            raise _damaged(f"{name!r} as the tensor {qualified!r}, which it does not list")


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _damaged(received: object) -> CheckpointError:
    return CheckpointError(
        f"{NAME} of a checkpoint is damaged.",
        received=received,
        fix="Use an older checkpoint, or another copy of this one.",
    )
