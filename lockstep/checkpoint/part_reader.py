"""Reads parts of tensors from the files of a checkpoint.

Each process reads what it needs, in spans, and checks the hashes of these: so of what lies at the
ends of its parts it reads at most a span more.
"""

import hashlib
import json
import os
from bisect import bisect_right
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch

from lockstep.checkpoint.local_storage import LocalStorage
from lockstep.checkpoint.manifest import FileEntry
from lockstep.checkpoint.reading import DamagedPartError, read_manifest

_SIZE_BYTES = 8


class PartReader:
    """Reads a generation; to be closed.

    Args:
        generation: its folder.

    Attributes:
        tensors: those in files with spans, by qualified name.
        num_bytes: read so far.

    Raises:
        CheckpointError, OSError: the manifest or a header is damaged, or cannot be read.
    """

    def __init__(self, generation: str) -> None:
        self.num_bytes = 0
        self._files: dict[str, _File] = {}
        manifest, storage = read_manifest(Path(generation)), LocalStorage(Path(generation))
        with ExitStack() as stack:
            for name, entry in manifest.files.items():
                if entry.spans:
                    file = stack.enter_context(storage.opened(name))
                    self._files[name] = _File(file, name, entry)
            self._opened = stack.pop_all()
        partitioned = manifest.tensors.items()
        self.tensors = {name: one for name, one in partitioned if one.file in self._files}

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    @torch.no_grad()
    def read_into(self, tensor: torch.Tensor, name: str, start: int) -> None:
        """Fill contiguous memory, on any device, with elements of a tensor.

        Args:
            tensor: the memory.
            name: of the tensor in the files.
            start: the number of elements before the first.

        Raises:
            DamagedPartError: bytes are damaged.
            OSError: they cannot be read.
        """
        flat = tensor.detach().view(-1)
        here = flat if flat.device.type == "cpu" else torch.empty_like(flat, device="cpu")
        data = here.view(torch.uint8).numpy().data
        first = start * flat.element_size()
        self.num_bytes += self._files[self.tensors[name].file].fill(data, name, first)
        if here is not flat:
            flat.copy_(here)

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A whole tensor, in new memory, of the form of another; raises as ``read_into`` does."""
        tensor = torch.empty(like.shape, dtype=like.dtype)
        self.read_into(tensor, name, 0)
        return tensor


class _File:
    """A file: spans, and where each tensor begins."""

    def __init__(self, file: BinaryIO, name: str, entry: FileEntry) -> None:
        self._file, self._name = file, name
        self._stops = [span.stop for span in entry.spans]
        self._hashes = [span.sha256 for span in entry.spans]
        header = self._span(0)
        text = header[_SIZE_BYTES:]
        self._starts = {
            key: len(header) + one["data_offsets"][0]
            for key, one in json.loads(bytes(text)).items()
            if key != "__metadata__"
        }

    def fill(self, data: memoryview, name: str, start: int) -> int:
        """Fill memory with bytes of a tensor; returns the number of bytes read."""
        first = self._starts[name] + start
        at, num_read = first, 0
        while at < first + len(data):
            index = bisect_right(self._stops, at)
            found = self._span(index)
            begin = self._stops[index] - len(found)
            own = found[at - begin : first + len(data) - begin]
            data[at - first : at - first + len(own)] = own
            at, num_read = at + len(own), num_read + len(found)
        return num_read

    def _span(self, index: int) -> memoryview:
        """The bytes of a span.

        Raises:
            DamagedPartError: they are damaged.
        """
        if index == len(self._stops):
            raise DamagedPartError(f"{self._name} ends too early")
        start = self._stops[index - 1] if index else 0
        data = os.pread(self._file.fileno(), self._stops[index] - start, start)
        if hashlib.sha256(data).hexdigest() != self._hashes[index]:
            raise DamagedPartError(
                f"bytes {start} to {self._stops[index]} of {self._name} are damaged"
            )
        return memoryview(data)
