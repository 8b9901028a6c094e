"""Which samples went into a step: a word of 8 bytes for each, the user's number or a digest."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from lockstep.errors import OptionError
from lockstep.proof.recording.record_frames import Samples

_PRIME = 0x100000001B3  # of the hash FNV-1a


def samples_of(values: tuple[Any, ...]) -> Samples:
    """The words of a batch.

    Args:
        values: numbers of samples, one for each; or tensors, arrays, or trees of them, whose first
            dim is that of samples; or texts, one for each sample.

    Raises:
        OptionError: nothing was given, or its parts have different numbers of samples.
    """
    columns = [column for value in values for column in _columns(value)]
    lengths = {len(words) for words, _ in columns}
    if len(lengths) != 1:
        raise OptionError(
            "record.batch takes a batch: numbers of samples, or tensors with the samples in their "
            "first dim.",
            received=f"parts with {sorted(lengths)} samples" if lengths else "nothing",
            fix="For example: record.batch(indices), or record.batch(inputs, targets).",
        )
    if len(columns) == 1:
        words, are_ids = columns[0]
        return Samples(are_ids, words.astype("<i8").tobytes())
    mixed = np.zeros(lengths.pop(), np.uint64)
    with np.errstate(over="ignore"):
        for words, _ in columns:
            mixed = (mixed ^ words.view(np.uint64)) * np.uint64(_PRIME)
            mixed ^= mixed >> np.uint64(29)
    return Samples(False, mixed.view(np.int64).astype("<i8").tobytes())


def words_of(samples: Samples) -> np.ndarray:
    """The words, as int64."""
    return np.frombuffer(samples.words, "<i8")


def _columns(value: Any) -> Iterable[tuple[np.ndarray, bool]]:
    """Words of each tensor in a tree, and whether they are numbers of samples."""
    if isinstance(value, Mapping):
        return [column for one in value.values() for column in _columns(one)]
    if isinstance(value, list | tuple) and not _is_flat(value):
        return [column for one in value for column in _columns(one)]
    if isinstance(value, list | tuple) and value and isinstance(value[0], str):
        return [(np.array([_word_of_text(text) for text in value], np.int64), False)]
    return [_words(torch.as_tensor(value).detach().cpu())]


def _is_flat(value: Any) -> bool:
    return all(isinstance(one, int | float | str | np.integer) for one in value)


def _words(tensor: torch.Tensor) -> tuple[np.ndarray, bool]:
    if tensor.dim() == 0:
        tensor = tensor[None]
    if tensor.dim() == 1 and not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.long().numpy(), True
    rows = tensor.contiguous().reshape(len(tensor), -1)
    raw = rows.view(torch.uint8)
    size = 4 if raw.shape[1] % 4 == 0 and raw.storage_offset() % 4 == 0 else 1
    words = raw.view(torch.int32 if size == 4 else torch.uint8).numpy()
    return _hash_rows(words), False


def _hash_rows(words: np.ndarray) -> np.ndarray:
    """The sum of each row's words times odd numbers: in any order of summing the same."""
    multipliers = (np.arange(words.shape[1], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | (
        np.uint64(1)
    )
    mixed = (multipliers ^ (multipliers >> np.uint64(31))).view(np.int64)
    hashes: np.ndarray = np.einsum("ij,j->i", words.astype(np.int64), mixed)
    return hashes


def _word_of_text(text: str) -> int:
    word = 0xCBF29CE484222325
    for byte in text.encode():
        word = ((word ^ byte) * _PRIME) & (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
