"""Weights as safetensors: whole tensors by name, whatever strategy trained them."""

import errno
import json
import os
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lockstep.disk import replacing
from lockstep.errors import CheckpointError, OptionError, Problems
from lockstep.options import check_weights_path

State = dict[str, torch.Tensor]

WriteTensors = Callable[[State, dict[str, str], BinaryIO], None]
"""Writes tensors and metadata to a new file, in the format of safetensors."""

_ALIAS = "alias:"
# The format has no complex128: such a tensor is written as pairs of float64, and metadata names it.
_PAIRS = "complex128:"

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.complex128: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _nothing() -> None:
    return


def save_weights(
    model: nn.Module, path: str | os.PathLike[str], write: "WriteTensors | None" = None
) -> None:
    """Write ``model.state_dict()``: see ``save_state_dict``."""
    save_state_dict(model.state_dict(), path, write)


def save_state_dict(
    state: Mapping[str, Any], path: str | os.PathLike[str], write: "WriteTensors | None" = None
) -> None:
    """Write a model's ``state_dict()``; the file appears complete or not at all.

    It gets the permissions of the file that it replaces.

    Tensors are written one by one: memory for a copy of the largest is enough.

    A tied tensor is written once, under its first name; its other names are in the metadata.

    Args:
        state: the tensors by name.
        path: of the file.
        write: writes the file; None is ``write_tensors``.

    Raises:
        CheckpointError: the state has a value that is not a tensor; the path is that of a folder, a
            pipe or a device.
        OptionError: the path is a URL, or ends as files of other formats do.
        FileNotFoundError: there is no such folder.
    """
    problems = Problems()
    check_weights_path("path", path, problems)
    problems.raise_if_any(OptionError)
    target = Path(os.path.realpath(path))  # a link stays, and points to the new file
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "The folder to save into does not exist", str(path))
    mode = _mode_of(target)
    tensors: State = {}
    metadata = {"format": "pt"}
    first_names: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                "A safetensors file can hold tensors only.",
                received=f"{name!r}, a {type(value).__name__} (from get_extra_state?)",
                fix="Save it separately, or keep it in a buffer.",
            )
        first = first_names.setdefault(_place(name, value), name)
        if first != name:
            metadata[_ALIAS + name] = first
            continue
        tensors[name] = value.detach()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with replacing(target, num_bytes, mode) as file:
        (write or write_tensors)(tensors, metadata, file)


def _place(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for all names of one tensor; a tensor without elements is equal to no other."""
    if not tensor.numel():
        return (name,)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _mode_of(path: Path) -> int | None:
    """The permissions of an existing file; None if there is none.

    Raises:
        CheckpointError: the path is not a file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            "Weights must be saved into a file.",
            received=f"{path}, {_kind_of(mode)}",
            fix="Give the path of a file, which need not exist yet.",
        )
    return stat.S_IMODE(mode)


def _kind_of(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"


def write_tensors(
    tensors: State, metadata: dict[str, str], file: BinaryIO, after: Callable[[], None] = _nothing
) -> None:
    """Write the header, and the elements of all tensors behind it."""
    file.write(header_of(tensors, metadata)[0])
    for tensor in tensors.values():
        elements = tensor.cpu().contiguous().reshape(-1)
        if elements.numel():
            file.write(elements.view(torch.uint8).numpy().data)
        after()


def header_of(tensors: State, metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with tensors, and where each begins, in bytes after the header.

    The format of safetensors: size of the header, the header as JSON, the elements.
    https://huggingface.co/docs/safetensors/index#format
    """
    pairs = {name for name, tensor in tensors.items() if tensor.dtype == torch.complex128}
    noted = {_PAIRS + name: "" for name in sorted(pairs)}
    header: dict[str, Any] = {"__metadata__": metadata | noted}
    starts = {}
    end = 0
    for name, tensor in tensors.items():
        starts[name], end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _dtype_name(name, tensor),
            "shape": [*tensor.shape, 2] if name in pairs else list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    try:
        return _DTYPE_NAMES[tensor.dtype]
    except KeyError:
        raise CheckpointError(
            "A safetensors file cannot hold numbers of every type.",
            received=f"{name!r}, of {tensor.dtype}",
            fix="Convert it, or save it separately.",
        ) from None


@torch.no_grad()
def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    after: Callable[[], None] = _nothing,
    without: Collection[str] = (),
) -> None:
    """Read what ``save_weights`` wrote into a model, in place.

    Args:
        model: the model.
        path: of the file.
        after: called after each tensor.
        without: names of tensors that are checked and not read.

    Raises:
        CheckpointError: the file is not valid, or names, shapes or dtypes do not fit; nothing is
            changed then.
    """
    loaded = _read(path)
    own = model.state_dict()
    problems = Problems()
    _check_names(own, loaded, path, problems)
    _check_tensors(own, loaded, problems)
    problems.raise_if_any(CheckpointError)
    for name, value in own.items():
        if name not in without:
            value.copy_(loaded[name])
            after()


class WeightsReader:
    """Reads parts of the tensors of a file that ``load_weights`` has checked; to be closed.

    Args:
        path: of the file.

    Attributes:
        num_bytes: read so far.

    Raises:
        CheckpointError: the file is not valid.
    """

    def __init__(self, path: str) -> None:
        self.num_bytes = 0
        self._tensors = _read(path)

    def close(self) -> None:
        """Close the file."""
        self._tensors = {}

    @torch.no_grad()
    def read_into(self, tensor: torch.Tensor, name: str, start: int) -> None:
        """Fill contiguous memory with elements of a tensor, behind the first ``start``."""
        part = self._tensors[name].view(-1)[start : start + tensor.numel()]
        tensor.detach().view(-1).copy_(part)
        self.num_bytes += part.nbytes


def _check_names(
    own: State, loaded: State, path: str | os.PathLike[str], problems: Problems
) -> None:
    missing, unexpected = own.keys() - loaded.keys(), loaded.keys() - own.keys()
    if missing or unexpected:
        lists = f"missing {sorted(missing) or 'none'}, unexpected {sorted(unexpected) or 'none'}"
        problems.add(
            f"{os.fspath(path)} must have the model's names.",
            received=lists,
            fix="Load it into the model it was saved from.",
        )


def _check_tensors(own: State, loaded: State, problems: Problems) -> None:
    fix = "Load it into the model it was saved from."
    first_names: dict[tuple[Any, ...], str] = {}
    for name in [name for name in own if name in loaded]:
        mine, other = own[name], loaded[name]
        first = first_names.setdefault(_place(name, mine), name)
        if mine.shape != other.shape:
            shapes = tuple(mine.shape), tuple(other.shape)
            problems.add(f"{name!r} must have shape {shapes[0]}.", received=shapes[1], fix=fix)
        elif not torch.can_cast(other.dtype, mine.dtype):
            problems.add(f"{name!r} must hold {mine.dtype}.", received=other.dtype, fix=fix)
        elif loaded[first] is not other and not torch.equal(
            loaded[first].to(mine.dtype), other.to(mine.dtype)
        ):
            problems.add(
                f"{first!r} and {name!r} are one tensor of the model and must be equal.",
                received="different values",
                fix=fix,
            )


def _read(path: str | os.PathLike[str]) -> State:
    try:
        tensors, metadata = _opened(_checked(path))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise _no_weights(path, error) from error
    aliases = {
        key.removeprefix(_ALIAS): first for key, first in metadata.items() if key.startswith(_ALIAS)
    }
    for name, first in aliases.items():
        if first not in tensors or name in tensors:
            raise _no_weights(path, f"{name!r} as another name of {first!r} in its metadata")
    return tensors | {name: tensors[first] for name, first in aliases.items()}


def mapped_tensors(path: str) -> State:
    """The tensors of a file, whose memory is read from it when they are used.

    Raises:
        CheckpointError: it is no safetensors file.
    """
    try:
        return _opened(path)[0]
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise _no_weights(path, error) from error


def _opened(path: str) -> tuple[State, dict[str, str]]:
    """The tensors and the metadata of a file."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return as_written(tensors, metadata), metadata


def as_written(tensors: State, metadata: Mapping[str, str]) -> State:
    """The tensors of a file with its metadata; complex ones are views of their pairs.

    Raises:
        RuntimeError: a tensor that is said to have pairs has none.
    """
    return {
        name: torch.view_as_complex(one) if _PAIRS + name in metadata else one
        for name, one in tensors.items()
    }


def _checked(path: Any) -> str:
    """The path of a file; opening a pipe could block for ever.

    Raises:
        OSError, ValueError: it is not a file.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"a {type(path).__name__}, which is not a path")
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(_kind_of(mode))
    return os.fsdecode(path)


def _no_weights(path: object, received: object) -> CheckpointError:
    return CheckpointError(
        f"{path} must be a safetensors file.",
        received=received,
        fix="Give the path of a file that save() wrote.",
    )
