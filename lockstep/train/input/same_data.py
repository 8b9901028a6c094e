"""Checks that data which every host reads for itself is the same on all hosts.

Each host has a copy of its own; without a check, training would use one that differs. So the hosts
compare shapes and types of all parts, and values: all values of small arrays; of larger data, or
data read sample by sample, those of samples spread evenly over it. They choose the number of
samples as they go, alike on all hosts: few, then four times as many, as long as the slowest host
needs no notable time. So they compare data that is slow to read as well, by fewer samples.

Random numbers drawn in reading are the same everywhere, and training draws as if nothing had been
read.
"""

import time
from collections.abc import Iterable

import torch

from lockstep.data.map_style.samples import array_bytes
from lockstep.data.map_style.sources import ArraySource, Batch, Source, named_parts
from lockstep.data.order import kept_streams, seed_streams
from lockstep.formatting import first_few
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.resume.stable_descriptions import Facts, digest

# Arrays up to this size are compared whole, which takes some hundredths of a second.
WHOLE_BYTES = 32 << 20

# Of this many intervals between samples, compare every 64th, with both ends of the data; then every
# 16th, every 4th, and all, as long as all reads so far have taken no longer than LONGEST_SECONDS.
_NUM_INTERVALS = 512
_STRIDES = (64, 16, 4, 1)
LONGEST_SECONDS = 0.1


def check_same_data(hosts: Hosts, source: Source | SharedStream | None, name: str) -> None:
    """Check that all hosts have the same data, or all a stream, or none.

    Args:
        hosts: all of them; they call this together.
        source: this host's.
        name: the argument's name, for messages.

    Raises:
        HostError: raised on all hosts, with what differs.
        DataError: a sample cannot be read.
    """
    hosts.check_equal({f"the kind of {name}": _kind(source)})
    if source is None or isinstance(source, SharedStream):
        return
    hosts.check_equal({f"the number of samples of {name}": len(source)})
    if isinstance(source, ArraySource):
        hosts.check_equal(_forms([source], name))
    if isinstance(source, ArraySource) and array_bytes(source) <= WHOLE_BYTES:
        hosts.check_equal(_values([source], name))
    else:
        _check_samples(hosts, source, name)


def fingerprint(source: Source | SharedStream | None) -> str:
    """A description for a later ``fit`` to compare; of arrays with all or some of their values."""
    said = _kind(source)
    if source is None or isinstance(source, SharedStream):
        return said
    said = f"{said} of {len(source)} samples"
    if not isinstance(source, ArraySource):
        return said
    picked = torch.arange(len(source))
    if array_bytes(source) > WHOLE_BYTES:
        picked = picked[:: max(len(source) // _NUM_INTERVALS, 1)]
    batch = source.read(picked, None)
    return f"{said} ({digest(tensor for _, tensor in named_parts(batch)).hex()[:8]})"


def _kind(source: Source | SharedStream | None) -> str:
    if source is None:
        return "none"
    if isinstance(source, SharedStream):
        return "a stream"
    return "arrays" if isinstance(source, ArraySource) else "a map-style dataset"


def _check_samples(hosts: Hosts, source: Source, name: str) -> None:
    last = len(source) - 1
    spread = [last * number // _NUM_INTERVALS for number in range(_NUM_INTERVALS + 1)]
    compared: set[int] = set()
    seconds = 0.0
    for stride in _STRIDES if last >= 0 else ():
        picked = sorted({*spread[::stride]} - compared)
        began = time.perf_counter()
        samples = _read(source, picked)
        seconds += time.perf_counter() - began
        some = f"{name}, samples {first_few(picked)}"
        hosts.check_equal({**_forms(samples, some), **_values(samples, some)})
        compared.update(picked)
        if max(hosts.from_all(seconds)) > LONGEST_SECONDS or len(compared) == len(source):
            break


def _read(source: Source, indices: Iterable[int]) -> list[Batch]:
    """Samples one by one: they may be of different shapes."""
    with kept_streams():
        seed_streams(0)
        return [source.read(torch.tensor([index]), None) for index in indices]


def _forms(data: Iterable[ArraySource | Batch], name: str) -> Facts:
    """Type and shape of a sample, by part; several if samples differ."""
    found: dict[str, dict[str, None]] = {}
    for each in data:
        for part, tensor in named_parts(each):
            form = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape[1:])}"
            found.setdefault(f"the form of {part} of {name}", {})[form] = None
    return {part: "; ".join(forms) for part, forms in found.items()}


def _values(data: Iterable[ArraySource | Batch], name: str) -> Facts:
    """A digest of all values of each part."""
    found: dict[str, list[torch.Tensor]] = {}
    for each in data:
        for part, tensor in named_parts(each):
            found.setdefault(f"the values of {part} of {name}", []).append(tensor)
    return {part: digest(tensors).hex() for part, tensors in found.items()}
