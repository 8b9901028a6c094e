"""MNIST from a local folder, for examples, the demo and benchmarks.

It reads the two usual forms: the four idx files of its authors (plain or gzip, as in torchvision)
and Keras's ``mnist.npz``. It never downloads, so that examples run without a network. Incomplete
downloads are common, so every size in a header is checked against the bytes of the file.

Not covered: EMNIST and other sets with images that are not 28x28 or labels outside 0 to 9.

Source of the format: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import math
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from lockstep.errors import DataError

__all__ = ["Mnist", "load_mnist"]

Split = tuple[NDArray[np.float32], NDArray[np.int64]]

_SIDE = 28
_NUM_CLASSES = 10
_NPZ_NAME = "mnist.npz"
_GZIP_MAGIC = b"\x1f\x8b"
_IDX_NAMES = {  # split: (images, labels)
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_NPZ_KEYS = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}
# What numpy and zipfile raise, depending on which byte is wrong.
_ARCHIVE_ERRORS = (EOFError, OSError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mnist:
    """Two splits, each the pair (images, labels) that ``Trainer.fit`` and ``evaluate`` take.

    Images are float32 in [0, 1] of shape (n, 1, 28, 28), labels int64 of shape (n,). Compared by
    identity, as arrays have no single truth value.
    """

    train: Split
    test: Split


def load_mnist(folder: str | os.PathLike[str]) -> Mnist:
    """Read MNIST from a folder, or from the ``.npz`` file itself.

    The folder holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``,
    ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, each plain or with ``.gz`` (the plain
    one is read if both exist), or ``mnist.npz`` with the arrays ``x_train``, ``y_train``,
    ``x_test`` and ``y_test``. The idx files have priority over the archive.

    If only one of the two splits exists, the training or the test (``t10k``) one, it is cut in file
    order: its first 90 % become ``train`` and the rest ``test``. Scores on such a ``test`` are not
    comparable with published ones.

    Raises:
        DataError: there is no MNIST, one file of a pair is missing, or a file is damaged.
    """
    path = Path(folder).expanduser()
    if path.is_dir():
        return _complete(_read_folder(path), path)
    if path.is_file() and path.suffix == ".npz":
        return _complete(_read_npz(path), path)
    raise DataError(
        "Cannot load MNIST: looked for a folder with its files, or an .npz file.",
        received=f"{path}, which {'is neither' if path.exists() else 'does not exist'}",
        fix=f"Give the folder that holds {_wanted()}.",
    )


def _complete(splits: dict[str, Split], path: Path) -> Mnist:
    """Make a missing split from the end of the other."""
    if len(splits) == 2:
        return Mnist(**splits)
    (name, (images, labels)), *_ = splits.items()
    cut = len(labels) * 9 // 10
    if cut == 0:
        raise DataError(
            f"Cannot divide MNIST's {name} split into two, and {path} has no other: looked "
            "for at least 2 images.",
            received=len(labels),
            fix="Add images, or the files of the other split.",
        )
    return Mnist(train=(images[:cut], labels[:cut]), test=(images[cut:], labels[cut:]))


def _read_folder(folder: Path) -> dict[str, Split]:
    splits = {
        split: _to_split(_read_idx(images, 3), _read_idx(labels, 1), f"{images} and {labels}")
        for split, (images, labels) in _find_pairs(folder).items()
    }
    if splits:
        return splits
    if (folder / _NPZ_NAME).is_file():
        return _read_npz(folder / _NPZ_NAME)
    raise DataError(
        f"No MNIST in {folder}: looked for {_wanted()}.",
        received=_listing(folder),
        fix="Give the folder that holds them: torchvision keeps them in <root>/MNIST/raw, "
        "Keras in ~/.keras/datasets.",
    )


def _find_pairs(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Find each split's files: both or neither, because one alone is an incomplete copy."""
    pairs, missing = {}, []
    for split, names in _IDX_NAMES.items():
        images, labels = (_find(folder, name) for name in names)
        if images and labels:
            pairs[split] = (images, labels)
        elif images or labels:
            missing.append(names[1] if images else names[0])
    if missing:
        raise DataError(
            f"Images and labels come in pairs, but {folder} lacks {' and '.join(missing)} "
            "(plain or .gz).",
            received=_listing(folder),
            fix="Put it beside its partner, or remove the partner.",
        )
    return pairs


def _find(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, folder / f"{name}.gz")
    return next((file for file in candidates if file.is_file()), None)


def _read_idx(file: Path, ndim: int) -> NDArray[np.uint8]:
    """Read one idx file: a magic number, ``ndim`` sizes (big-endian int32), unsigned bytes."""
    content = _read_bytes(file)
    header_bytes = 4 * (1 + ndim)
    if len(content) < header_bytes:
        raise _damaged(file, f"a header of {header_bytes} bytes", f"{len(content)} bytes in all")
    magic, *shape = (int(word) for word in np.frombuffer(content, ">u4", 1 + ndim))
    expected = 0x0800 | ndim  # 08: unsigned bytes; last byte: the number of dimensions
    if magic != expected:
        raise _damaged(file, f"the magic number {expected:#010x}", f"{magic:#010x}")
    num_bytes = math.prod(shape)
    if len(content) - header_bytes != num_bytes:
        raise _damaged(
            file,
            f"{num_bytes} bytes of data, as its header gives the shape {tuple(shape)}",
            f"{len(content) - header_bytes} bytes",
        )
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def _read_bytes(file: Path) -> bytes:
    """Read a whole file, unpacked if its content is gzip.

    The name does not decide: browsers unpack downloads and leave ``.gz`` in it.
    """
    content = file.read_bytes()
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise _damaged(file, "a whole gzip file", f"one that does not unpack ({error})") from error


def _read_npz(file: Path) -> dict[str, Split]:
    arrays = _load_arrays(file, [key for keys in _NPZ_KEYS.values() for key in keys])
    splits = {}
    for split, keys in _NPZ_KEYS.items():
        missing = [key for key in keys if key not in arrays]
        if not missing:
            images, labels = (arrays[key] for key in keys)
            splits[split] = _to_split(images, labels, f"{' and '.join(keys)} of {file}")
        elif len(missing) == 1:
            raise _damaged(file, f"{missing[0]} beside its partner", f"only {sorted(arrays)}")
    if not splits:
        raise _damaged(file, f"at least one of the pairs {[*_NPZ_KEYS.values()]}", "neither")
    return splits


def _load_arrays(file: Path, keys: list[str]) -> dict[str, NDArray[Any]]:
    """Read the keys that exist. Pickled arrays are refused, because loading would run code."""
    wanted = "an .npz archive of plain arrays"
    with file.open("rb") as stream:  # np.load leaks the file it opens when that is damaged
        try:
            archive = np.load(stream, allow_pickle=False)
            if isinstance(archive, NpzFile):
                return {key: np.asarray(archive[key]) for key in keys if key in archive}
        except _ARCHIVE_ERRORS as error:
            raise _damaged(file, wanted, f"one that does not load ({error})") from error
    raise _damaged(file, wanted, "a single array")


def _to_split(images: NDArray[Any], labels: NDArray[Any], source: str) -> Split:
    """Check that images and labels belong together, and scale the images to [0, 1]."""
    if images.dtype != np.uint8 or images.shape[1:] != (_SIDE, _SIDE):
        raise _damaged(
            source, f"images of shape (n, {_SIDE}, {_SIDE}) and type uint8", _describe(images)
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise _damaged(source, "labels of shape (n,) and an integer type", _describe(labels))
    if len(images) != len(labels) or len(labels) == 0:
        raise _damaged(
            source,
            "as many images as labels, at least one",
            f"{len(images)} images and {len(labels)} labels",
        )
    if labels.min() < 0 or labels.max() >= _NUM_CLASSES:
        raise _damaged(
            source,
            f"labels from 0 to {_NUM_CLASSES - 1}",
            f"labels from {labels.min()} to {labels.max()}",
        )
    scaled = images.reshape(-1, 1, _SIDE, _SIDE).astype(np.float32)
    scaled /= 255
    return scaled, labels.astype(np.int64)


def _describe(array: NDArray[Any]) -> str:
    return f"shape {array.shape} and type {array.dtype}"


def _damaged(source: Path | str, wanted: str, received: str) -> DataError:
    return DataError(
        f"Damaged, or not MNIST: {source}. Looked for {wanted}.",
        received=received,
        fix="Copy or download it again.",
    )


def _wanted() -> str:
    names = ", ".join(name for pair in _IDX_NAMES.values() for name in pair)
    return f"{names} (plain or .gz; one split is enough) or {_NPZ_NAME}"


def _listing(folder: Path, num_shown: int = 10) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    more = f" and {len(names) - num_shown} more" if len(names) > num_shown else ""
    return ", ".join(names[:num_shown]) + more if names else "an empty folder"
