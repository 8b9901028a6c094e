"""MNIST's reader: both forms on disk, and a clear error for each way a file can be wrong."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.data.mnist import Mnist, load_mnist
from lockstep.errors import DataError

REAL_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "mnist-10k"
PREFIXES = {"train": "train", "test": "t10k"}

Bytes = NDArray[np.uint8]
Writer = Callable[[Path], None]


def make_pair(num_images: int, seed: int = 0) -> tuple[Bytes, Bytes]:
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (num_images, 28, 28), dtype=np.uint8)
    return images, generator.integers(0, 10, num_images, dtype=np.uint8)


def idx_bytes(array: Bytes) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def idx_names(split: str) -> tuple[str, str]:
    prefix = PREFIXES[split]
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def write_idx(folder: Path, split: str, pair: tuple[Bytes, Bytes], packed: bool = False) -> None:
    for name, array in zip(idx_names(split), pair, strict=True):
        content = idx_bytes(array)
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def write_npz(file: Path, **arrays: NDArray[Any]) -> Path:
    with file.open("wb") as stream:
        np.savez(stream, allow_pickle=True, **arrays)
    return file


def npz_arrays(train: tuple[Bytes, Bytes], test: tuple[Bytes, Bytes]) -> dict[str, Bytes]:
    return {"x_train": train[0], "y_train": train[1], "x_test": test[0], "y_test": test[1]}


def assert_split(
    split: tuple[NDArray[np.float32], NDArray[np.int64]], expected: tuple[Bytes, Bytes]
) -> None:
    images, labels = split
    assert images.dtype == np.float32
    assert labels.dtype == np.int64
    assert images.shape == (len(expected[0]), 1, 28, 28)
    assert np.array_equal(np.rint(images[:, 0] * 255), expected[0])
    assert np.array_equal(labels, expected[1])


@pytest.mark.parametrize("packed", [False, True])
def test_reads_four_idx_files(tmp_path: Path, packed: bool) -> None:
    train, test = make_pair(7, seed=1), make_pair(3, seed=2)
    write_idx(tmp_path, "train", train, packed)
    write_idx(tmp_path, "test", test, packed)

    mnist = load_mnist(tmp_path)

    assert_split(mnist.train, train)
    assert_split(mnist.test, test)


def test_scales_bytes_to_zero_and_one(tmp_path: Path) -> None:
    images = np.zeros((2, 28, 28), np.uint8)
    images[1] = 255
    write_idx(tmp_path, "train", (images, np.array([0, 9], np.uint8)))

    mnist = load_mnist(str(tmp_path))

    assert mnist.train[0].min() == mnist.train[0].max() == 0.0
    assert mnist.test[0].min() == mnist.test[0].max() == 1.0


def test_split_can_be_written_to(tmp_path: Path) -> None:
    write_idx(tmp_path, "test", make_pair(10))
    mnist = load_mnist(tmp_path)
    for array in (*mnist.train, *mnist.test):
        array[:] = 0


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize("label_type", [np.uint8, np.int32, np.int64])
def test_reads_keras_archive(tmp_path: Path, as_folder: bool, label_type: type[Any]) -> None:
    train, test = make_pair(7, seed=1), make_pair(3, seed=2)
    labels = {"y_train": train[1].astype(label_type), "y_test": test[1].astype(label_type)}
    file = write_npz(tmp_path / "mnist.npz", **{**npz_arrays(train, test), **labels})

    mnist = load_mnist(tmp_path if as_folder else file)

    assert_split(mnist.train, train)
    assert_split(mnist.test, test)


def test_archive_by_path_may_have_any_name(tmp_path: Path) -> None:
    file = write_npz(tmp_path / "digits.npz", **npz_arrays(make_pair(4), make_pair(3)))
    assert len(load_mnist(os.fspath(file)).test[1]) == 3


def test_idx_files_win_over_archive(tmp_path: Path) -> None:
    write_npz(tmp_path / "mnist.npz", **npz_arrays(make_pair(4), make_pair(3)))
    write_idx(tmp_path, "train", make_pair(7))
    write_idx(tmp_path, "test", make_pair(6))
    assert len(load_mnist(tmp_path).train[1]) == 7


def test_plain_file_wins_over_packed_one(tmp_path: Path) -> None:
    write_idx(tmp_path, "test", make_pair(20))
    write_idx(tmp_path, "test", make_pair(10), packed=True)
    assert len(load_mnist(tmp_path).train[1]) == 18


def test_unpacked_file_that_kept_its_gz_name(tmp_path: Path) -> None:
    pair = make_pair(10)
    for name, array in zip(idx_names("test"), pair, strict=True):
        (tmp_path / f"{name}.gz").write_bytes(idx_bytes(array))
    assert_split(load_mnist(tmp_path).train, (pair[0][:9], pair[1][:9]))


def write_lone_idx(folder: Path, split: str, pair: tuple[Bytes, Bytes]) -> None:
    write_idx(folder, split, pair, packed=True)


def write_lone_npz(folder: Path, split: str, pair: tuple[Bytes, Bytes]) -> None:
    write_npz(folder / "mnist.npz", **{f"x_{split}": pair[0], f"y_{split}": pair[1]})


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("write", [write_lone_idx, write_lone_npz])
@pytest.mark.parametrize(("num_images", "num_train"), [(20, 18), (19, 17), (2, 1)])
def test_lone_split_is_cut_nine_to_one(
    tmp_path: Path,
    split: str,
    write: Callable[[Path, str, tuple[Bytes, Bytes]], None],
    num_images: int,
    num_train: int,
) -> None:
    images, labels = make_pair(num_images)
    write(tmp_path, split, (images, labels))

    mnist = load_mnist(tmp_path)

    assert_split(mnist.train, (images[:num_train], labels[:num_train]))
    assert_split(mnist.test, (images[num_train:], labels[num_train:]))


def test_lone_image_cannot_be_cut(tmp_path: Path) -> None:
    write_idx(tmp_path, "test", make_pair(1))
    with pytest.raises(DataError, match=r"at least 2 images.*Received: 1"):
        load_mnist(tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere, which does not exist.*t10k-images.*mnist\.npz"):
        load_mnist(tmp_path / "nowhere")


def test_file_that_is_no_archive(tmp_path: Path) -> None:
    file = tmp_path / "mnist.pkl"
    file.touch()
    with pytest.raises(DataError, match=r"mnist\.pkl, which is neither"):
        load_mnist(file)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.*Received: an empty folder.*raw"):
        load_mnist(tmp_path)


def test_folder_of_other_files_lists_the_first_ten(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"note-{number:02}").touch()
    with pytest.raises(DataError, match=r"Received: note-00, .*note-09 and 2 more\."):
        load_mnist(tmp_path)


def test_all_missing_partners_are_named_at_once(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", make_pair(3))
    write_idx(tmp_path, "test", make_pair(3))
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(
        DataError, match=r"lacks train-labels-idx1-ubyte and t10k-images-idx3-ubyte \(plain or"
    ):
        load_mnist(tmp_path)


IMAGES, LABELS = (idx_bytes(array) for array in make_pair(9))
BIG = (0xFFFF_FFFF).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        pytest.param(LABELS, IMAGES, "magic number 0x00000803.*0x00000801", id="swapped"),
        pytest.param(b"<html>" * 9, LABELS, "magic number.*0x3c68746d", id="web page"),
        pytest.param(b"", LABELS, "header of 16 bytes.*Received: 0 bytes in all", id="empty"),
        pytest.param(IMAGES, LABELS[:6], "header of 8 bytes.*6 bytes in all", id="short header"),
        pytest.param(
            IMAGES[:-1], LABELS, r"7056 bytes.*\(9, 28, 28\).*7055 bytes", id="truncated images"
        ),
        pytest.param(IMAGES, LABELS[:-2], r"9 bytes.*\(9,\).*7 bytes", id="truncated labels"),
        pytest.param(IMAGES + b"\0", LABELS, "7056 bytes.*7057 bytes", id="bytes too many"),
        pytest.param(
            IMAGES[:4] + BIG * 3 + IMAGES[16:], LABELS, r"4294967295.*7056 bytes", id="huge sizes"
        ),
        pytest.param(
            gzip.compress(IMAGES)[:-900], LABELS, "whole gzip file.*not unpack", id="half gzip"
        ),
        pytest.param(
            gzip.compress(IMAGES)[:-8] + b"\0" * 8, LABELS, "whole gzip.*CRC", id="checksum"
        ),
        pytest.param(
            gzip.compress(IMAGES)[:10] + b"\xff" * 99, LABELS, "whole gzip", id="not deflated"
        ),
        pytest.param(
            IMAGES,
            idx_bytes(make_pair(4)[1]),
            "as many images as labels.*9 images and 4 labels",
            id="counts differ",
        ),
        pytest.param(
            idx_bytes(np.zeros((5, 32, 32), np.uint8)),
            LABELS,
            r"\(n, 28, 28\).*\(5, 32, 32\)",
            id="other image size",
        ),
        pytest.param(
            IMAGES,
            idx_bytes(np.arange(39, 48, dtype=np.uint8)),
            "labels from 0 to 9.*labels from 39 to 47",
            id="labels of another set",
        ),
        pytest.param(
            *(idx_bytes(array) for array in make_pair(0)), "at least one.*0 images", id="no images"
        ),
    ],
)
def test_damaged_idx_files(tmp_path: Path, images: bytes, labels: bytes, message: str) -> None:
    for name, content in zip(idx_names("test"), (images, labels), strict=True):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_mnist(tmp_path)
    assert str(tmp_path / "t10k-") in str(caught.value)
    assert "download it again" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"y_test": None}, "y_test beside its partner.*x_test", id="no labels"),
        pytest.param(
            {"x_train": None, "y_train": None, "x_test": None, "y_test": None},
            "at least one of the pairs.*x_train.*neither",
            id="other names",
        ),
        pytest.param(
            {"x_train": np.zeros((4, 28, 28))}, "uint8.*float64", id="images already scaled"
        ),
        pytest.param(
            {"y_train": np.eye(10, dtype=np.uint8)[:4]}, r"shape \(n,\).*\(4, 10\)", id="one-hot"
        ),
        pytest.param({"y_train": np.zeros(4)}, "integer type.*float64", id="float labels"),
        pytest.param({"y_train": np.full(4, -1)}, "labels from -1 to -1", id="negative labels"),
        pytest.param({"x_test": np.zeros((), np.uint8)}, r"shape \(\)", id="a scalar"),
        pytest.param({"x_test": np.array([None])}, "plain arrays.*pickle", id="pickled objects"),
    ],
)
def test_damaged_archives(
    tmp_path: Path, changes: dict[str, NDArray[Any] | None], message: str
) -> None:
    arrays = {**npz_arrays(make_pair(4), make_pair(3)), "more": np.zeros(1), **changes}
    file = write_npz(
        tmp_path / "mnist.npz", **{name: a for name, a in arrays.items() if a is not None}
    )
    with pytest.raises(DataError, match=message):
        load_mnist(file)


def write_nothing(file: Path) -> None:
    file.touch()


def write_text(file: Path) -> None:
    file.write_text("not found")


def write_single_array(file: Path) -> None:
    with file.open("wb") as stream:
        np.save(stream, np.zeros(3))


def write_half_archive(file: Path) -> None:
    write_npz(file, **npz_arrays(make_pair(4), make_pair(3)))
    file.write_bytes(file.read_bytes()[:-100])


def write_archive_with_flipped_bytes(file: Path) -> None:
    write_npz(file, **npz_arrays(make_pair(4), make_pair(3)))
    content = bytearray(file.read_bytes())
    content[1000] ^= 0xFF
    file.write_bytes(content)


@pytest.mark.parametrize(
    "write",
    [
        write_nothing,
        write_text,
        write_single_array,
        write_half_archive,
        write_archive_with_flipped_bytes,
    ],
)
def test_files_that_are_no_archive(tmp_path: Path, write: Writer) -> None:
    file = tmp_path / "mnist.npz"
    write(file)
    with pytest.raises(DataError, match=r"mnist\.npz. Looked for an \.npz archive of plain arrays"):
        load_mnist(file)


@pytest.mark.skipif(not REAL_FOLDER.is_dir(), reason="the real files are not on this machine")
def test_real_files() -> None:
    mnist = load_mnist(REAL_FOLDER)

    assert isinstance(mnist, Mnist)
    assert mnist.train[0].shape == (9_000, 1, 28, 28)
    assert mnist.test[0].shape == (1_000, 1, 28, 28)
    assert mnist.train[1][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    labels = np.concatenate([mnist.train[1], mnist.test[1]])
    assert np.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert float(mnist.train[0].min()) == 0.0
    assert float(mnist.train[0].max()) == 1.0
