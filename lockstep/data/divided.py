"""Data that holds back what is for other processes, as torch's DistributedSampler does.

Here a loader's batch is the global one, and is divided among the devices after it was read. A
loader left over from a script with a process per device would give each of them a part of a part,
and most of the data to nobody.

Found by the attributes that such samplers and datasets have (torch's, Accelerate's, Hugging Face's,
those of most libraries, and most that people write). A function that closes over one is not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.errors import DataError

# Among how many it divides, and which one's part it gives.
_COUNTS_AND_NUMBERS = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("num_processes", "process_index"),
)
_PARTS = ("sampler", "loader", "dataset", "distributed")
_FEW = 64


def check_whole(data: Any, name: str) -> None:
    """Refuse data of which others are to have the rest.

    Args:
        data: as a user gives it.
        name: the argument's name, for messages.

    Raises:
        DataError: with what divides it.
    """
    for part in _parts_of(data):
        for count, number in _COUNTS_AND_NUMBERS:
            among = _attribute(part, count)
            is_told = count == "num_replicas" or _attribute(part, number) is not None
            if isinstance(among, int) and among > 1 and is_told:
                raise DataError(
                    f"`{name}` must give all samples: each batch is divided among the devices "
                    "after it was read.",
                    received=f"a {type(data).__name__} with a {type(part).__name__} that "
                    f"gives one process of {among} its part ({count}={among})",
                    fix="Leave it out: pass shuffle=True to the DataLoader instead, and the "
                    "size of the global batch.",
                )


def _parts_of(data: Any) -> Iterator[Any]:
    """The data, and the samplers, loaders and datasets that it is made of."""
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
    """What a container holds, if it can be one of parts; else the value."""
    if not isinstance(value, list | tuple | Mapping):
        return [value]
    if len(value) > _FEW:
        return []
    return list(value.values() if isinstance(value, Mapping) else value)


def _attribute(part: Any, name: str) -> Any:
    """One that was set, and is no property that would do something when it is looked at."""
    own = getattr(part, "__dict__", {})
    return own.get(name, own.get(f"_{name}"))
