"""Slurm's short forms: node lists (``node[01-03,7],other``) and counts per node (``2(x3),1``).

They are expanded here, and not by ``scontrol``, because a container need not have Slurm's commands.
"""

import re
from collections.abc import Iterator
from itertools import islice

# More than Slurm manages: a longer list is a mistake, and must not fill the memory.
MAX_NODES = 1 << 16

_NODES = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names of a node list, in its order.

    Raises:
        ValueError: it is no node list, or too long; the message is what was received.
    """
    nodes: list[str] = []
    for part in _split(text):
        if _NODES.fullmatch(part) is None:
            raise ValueError(repr(text))
        nodes += islice(_expand(part, text), MAX_NODES + 1)
    _check_length(len(nodes), text)
    return tuple(nodes)


def expand_counts(text: str) -> tuple[int, ...]:
    """The counts per node, by node.

    Raises:
        ValueError: these are no counts, or too many; the message is what was received.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(repr(text))
        counts += [int(match[1])] * min(int(match[2] or 1), MAX_NODES + 1)
    _check_length(len(counts), text)
    return tuple(counts)


def _check_length(length: int, text: str) -> None:
    if length > MAX_NODES:
        raise ValueError(repr(text))


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    return re.split(r",(?![^\[]*\])", text)


def _expand(part: str, text: str) -> Iterator[str]:
    """All names of ``rack[1-2]node[01-02]``, varying the first brackets slowest."""
    start, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, rest = rest.partition("]")
    for number in _numbers(inside, text):
        for end in _expand(rest, text):
            yield f"{start}{number}{end}"


def _numbers(inside: str, text: str) -> Iterator[str]:
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise ValueError(repr(text))
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"  # as many digits as the first has: 08, 09, 10
