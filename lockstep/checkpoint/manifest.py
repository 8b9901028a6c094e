"""The manifest of a checkpoint: the contents, sizes and hashes of its files, and its own hash.

It is JSON: ``{"sha256":"...","manifest":{...}}``, where the hash is that of the bytes of the inner
object. A reader checks this form byte by byte: any flipped bit is detected.
"""

import hashlib
from collections.abc import Sequence
from operator import lt
from typing import Annotated, Any

import msgspec

from lockstep.errors import CheckpointError

NAME = "manifest.json"
VERSION = 1
_PARTED_VERSION = 2  # has files that several processes have written

# Names that cannot lead out of the folder of the manifest.
_FileName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9-]*\.safetensors\Z", max_length=64)]
_Hash = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Size = Annotated[int, msgspec.Meta(ge=0)]

_BEGIN, _MIDDLE, _END = b'{"sha256":"', b'","manifest":', b"}\n"
_HASH_LENGTH = 64


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of a file, of one process, after those of the span before.

    Attributes:
        stop: the byte after the last.
        sha256: of the bytes.
    """

    stop: _Size
    sha256: _Hash


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file with tensors.

    Attributes:
        size: in bytes.
        sha256: of all its bytes; of the spans' hashes if there are spans.
        spans: of the whole file, the first its header, so that parts can be read; older versions
            wrote none.
    """

    size: _Size
    sha256: _Hash
    spans: tuple[Span, ...] = ()

    @classmethod
    def of_spans(cls, size: int, spans: Sequence[Span]) -> "FileEntry":
        """The entry of a file with these spans."""
        return cls(size, hash_of_spans(spans), tuple(spans))


def hash_of_spans(spans: Sequence[Span]) -> str:
    """The hash of the hashes of a file's spans."""
    return _hash("".join(span.sha256 for span in spans).encode()).decode()


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

    @classmethod
    def of(cls, tensor: Any, file: str) -> "TensorEntry":
        """The entry of a tensor in a file."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), file)


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
        version: of this format; 2 if a file has spans.
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
    if any(entry.spans for entry in manifest.files.values()):
        manifest = msgspec.structs.replace(manifest, version=_PARTED_VERSION)
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
        if version not in (VERSION, _PARTED_VERSION):
            known = f"{VERSION} and {_PARTED_VERSION}"
            raise _damaged(f"version {version}; this Lockstep reads {known}")
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
    for name, file in manifest.files.items():
        if file.spans:
            _check_spans(name, file)
    for name, qualified in manifest.weights.items():
        if qualified not in manifest.tensors:
            raise _damaged(f"{name!r} as the tensor {qualified!r}, which it does not list")


def _check_spans(name: str, entry: FileEntry) -> None:
    stops = [span.stop for span in entry.spans]
    is_covered = stops[-1] == entry.size and all(map(lt, stops, stops[1:]))
    if not is_covered or entry.sha256 != hash_of_spans(entry.spans):
        raise _damaged(f"spans of {name} that are not those of {entry.size} bytes")


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _damaged(received: object) -> CheckpointError:
    return CheckpointError(
        f"{NAME} of a checkpoint is damaged.",
        received=received,
        fix="Use an older checkpoint, or another copy of this one.",
    )
