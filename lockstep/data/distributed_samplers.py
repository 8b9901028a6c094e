"""Refuses data that gives one process only its part, as torch's DistributedSampler does.

Here a loader's batch is the global one, and is divided among the devices after it was read. A
loader from a script with a process per device would give each device a part of a part, and most of
the data would not be used.

Such samplers and datasets are recognised by their attributes (torch's, Accelerate's, Hugging
Face's, and those of most libraries and scripts). A function that closes over one is not recognised.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.errors import DataError

# Attributes: the number of processes, and this process's number.
_COUNTS_AND_NUMBERS = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("num_processes", "process_index"),
)
_PARTS = ("sampler", "loader", "dataset", "distributed")
_FEW = 64


def check_whole(data: Any, name: str) -> None:
    """Refuse data that is one process's part.

    Args:
        data: as a user gives it.
        name: the argument's name, for messages.

    Raises:
        DataError: with the object that divides it.
    """
    for part in _parts_of(data):
        for count, number in _COUNTS_AND_NUMBERS:
            among = _attribute(part, count)
            is_divided = count == "num_replicas" or _attribute(part, number) is not None
            if isinstance(among, int) and among > 1 and is_divided:
                raise DataError(
                    f"`{name}` must give all samples: each batch is divided among the devices "
                    "after it was read.",
                    received=f"a {type(data).__name__} with a {type(part).__name__} that "
                    f"gives one process of {among} its part ({count}={among})",
                    fix="Leave it out: pass shuffle=True to the DataLoader instead, and the "
                    "size of the global batch.",
                )


def _parts_of(data: Any) -> Iterator[Any]:
    """The data, and the samplers, loaders and datasets within it."""
    found, seen = [data], set()
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for name, value in getattr(one, "__dict__", {}).items():
            if isinstance(value, Sampler | DataLoader | Dataset):
                found.append(value)
            elif any(part in name for part in _PARTS):
                found += _few_in(value)


def _few_in(value: Any) -> list[Any]:
    """The items of a small container; the value itself if it is none."""
    if not isinstance(value, list | tuple | Mapping):
        return [value]
    if len(value) > _FEW:
        return []
    return list(value.values() if isinstance(value, Mapping) else value)


def _attribute(part: Any, name: str) -> Any:
    """An attribute of the instance; no property, because reading it might have effects."""
    own = getattr(part, "__dict__", {})
    return own.get(name, own.get(f"_{name}"))
