"""Files of tensors that several processes write, each its parts of them.

A file is laid out first: its header is written, and where each tensor lies is known. Then every
process writes its elements there, and hashes them in spans. The files are those of ``weights``, so
every reader of safetensors reads them. ``generations`` makes checkpoints of them.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.checkpoint.manifest import FileEntry, Span
from lockstep.checkpoint.trees import Tensors
from lockstep.checkpoint.weights import header_of
from lockstep.comm.shared_memory.file_region import write_behind
from lockstep.disk import writing
from lockstep.errors import CheckpointError

# The most bytes that are hashed together: whoever reads a part reads as many more at its ends.
SPAN_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """Elements of a tensor that a process has.

    Attributes:
        name: the tensor's.
        start: the number of elements before them, in the order of the tensor's dims.
        elements: contiguous.
    """

    name: str
    start: int
    elements: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PartitionedFile:
    """A file that is laid out.

    Attributes:
        path: where processes open it; in a checkpoint relative to their folder of checkpoints.
        header: its first bytes.
        starts: where each tensor begins, in bytes from the beginning of the file.
        size: of the file in bytes.
        is_hashed: what is written is hashed.
        span_bytes: the most that are hashed together.
    """

    path: str
    header: bytes
    starts: Mapping[str, int]
    size: int
    is_hashed: bool
    span_bytes: int


@dataclass(frozen=True, kw_only=True)
class WrittenSpan:
    """Bytes of a file that a process has written.

    Attributes:
        path: of the file.
        start: the first byte.
        stop: the one after the last.
        sha256: of the bytes; "" if they are not hashed.
    """

    path: str
    start: int
    stop: int
    sha256: str


def lay_out(
    path: str, tensors: Tensors, metadata: dict[str, str], *, is_hashed: bool = True
) -> PartitionedFile:
    """The layout of a file with tensors, of which forms are used only."""
    header, starts = header_of(tensors, metadata)
    last = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return PartitionedFile(
        path=path,
        header=header,
        starts={name: len(header) + start for name, start in starts.items()},
        size=last,
        is_hashed=is_hashed,
        span_bytes=SPAN_BYTES,
    )


def can_be_partitioned(tensor: torch.Tensor) -> bool:
    """True if parts of a tensor's memory are parts of its elements in a file."""
    return tensor.layout == torch.strided and tensor.is_contiguous() and tensor.numel() > 0


def write_parts(
    files: Sequence[PartitionedFile], parts: Iterable[TensorPart], folder: str = ""
) -> list[WrittenSpan]:
    """Write a process's parts; they are on the disk afterwards.

    Args:
        files: which are laid out.
        parts: of their tensors.
        folder: to which relative paths are relative.

    Raises:
        OSError: a file cannot be written.
    """
    by_name = {name: file for file in files for name in file.starts}
    opened: dict[str, int] = {}
    spans: list[WrittenSpan] = []
    try:
        for part in parts:
            file = by_name[part.name]
            if file.path not in opened:
                path = os.path.join(folder, file.path)
                opened[file.path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            with writing(file.path, part.elements.nbytes):
                spans += _write_part(opened[file.path], file, part)
        for path, descriptor in opened.items():
            with writing(path):
                os.fsync(descriptor)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return spans


def _write_part(descriptor: int, file: PartitionedFile, part: TensorPart) -> Iterator[WrittenSpan]:
    flat = part.elements.detach().reshape(-1)
    first = file.starts[part.name] + part.start * flat.element_size()
    size = max(file.span_bytes // flat.element_size(), 1)
    for piece in flat.split(size):
        data = piece.cpu().view(torch.uint8).numpy().data
        _write_at(descriptor, data, first)
        digest = hashlib.sha256(data).hexdigest() if file.is_hashed else ""
        write_behind([piece])
        yield WrittenSpan(path=file.path, start=first, stop=first + len(data), sha256=digest)
        first += len(data)


def _write_at(descriptor: int, data: Any, start: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written


def check_written(file: PartitionedFile, written: Iterable[WrittenSpan]) -> list[Span]:
    """The spans of a file that all processes have written, after its header.

    Raises:
        CheckpointError: a part is missing, or was written twice.
    """
    last = len(file.header)
    own = sorted((one for one in written if one.path == file.path), key=lambda one: one.start)
    for one in own:
        if one.start != last:
            break
        last = one.stop
    if last != file.size:
        raise CheckpointError(
            "Processes must write all parts of a checkpoint, each once.",
            received=f"{last} of {file.size} bytes of {os.path.basename(file.path)}",
            fix="Please report this.",
        )
    return [Span(one.stop, one.sha256) for one in own]


def entry_of(file: PartitionedFile, written: Iterable[WrittenSpan]) -> FileEntry:
    """The manifest's entry of a file that all processes have written; see ``check_written``."""
    head = Span(len(file.header), hashlib.sha256(file.header).hexdigest())
    return FileEntry.of_spans(file.size, [head, *check_written(file, written)])
