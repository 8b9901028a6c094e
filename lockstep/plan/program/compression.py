"""Compression of tensors between hosts, as a Plan has it: how each tensor is made smaller.

None of them is exact. What a host could not send it adds to what it sends at the next step (error
feedback: Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847), so nothing is lost for
good. ``comm.compression.compressors`` has the arithmetic.
"""

import math
from collections.abc import Sequence

from lockstep.errors import OptionError, Problems
from lockstep.options import is_count, is_number
from lockstep.plan.plan_part import PlanPart

# Elements of a tensor that have a scale in common.
INT8_BLOCK = 1024

_FLOAT_BYTES = 4
_INDEX_BYTES = 4


class BFloat16(PlanPart, frozen=True, tag="bf16"):
    """The nearest numbers of bfloat16: 2 bytes for each element."""

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes that a host sends of a tensor in float32."""
        return 2 * math.prod(shape)

    def __str__(self) -> str:
        return "bfloat16"


class Int8(PlanPart, frozen=True, tag="int8"):
    """Integers from -127 to 127 times a scale for each 1,024 elements: 1 byte for each element."""

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes that a host sends of a tensor in float32."""
        size = math.prod(shape)
        return size + _FLOAT_BYTES * -(-size // INT8_BLOCK)

    def __str__(self) -> str:
        return "int8"


class PowerSGD(PlanPart, frozen=True, tag="power"):
    """Two thin factors of each matrix, from one step of a power iteration that goes on.

    Tensors of more than two dims count as matrices with a row for each of the first; those of
    fewer, and those that are no larger than their factors, are sent as they are. Vogels et al.,
    PowerSGD: Practical Low-Rank Gradient Compression (2019, arXiv 1905.13727).

    Attributes:
        rank: columns of each factor, at least 1.
        warm_up: steps (under ``LocalSGDStrategy`` averages) that are sent uncompressed, before the
            first that is compressed. Adam learns more with those of one or two epochs.

    Raises:
        OptionError: another number.
    """

    rank: int = 4
    warm_up: int = 0

    def __post_init__(self) -> None:
        if not is_count(self.warm_up, least=0):
            raise OptionError(
                "`warm_up` of PowerSGD must be an integer of at least 0.",
                received=f"warm_up={self.warm_up!r}",
                fix="Use the number of steps of an epoch, or leave it out.",
            )
        if not is_count(self.rank):
            raise OptionError(
                "`rank` of PowerSGD must be an integer of at least 1.",
                received=f"rank={self.rank!r}",
                fix="Use 4; 1 or 2 send less, and learn more slowly.",
            )

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes that a host sends of a tensor in float32."""
        if len(shape) < 2:
            return _FLOAT_BYTES * math.prod(shape)
        return _FLOAT_BYTES * self.rank * (shape[0] + math.prod(shape[1:]))

    def __str__(self) -> str:
        warm_up = f" (warm_up={self.warm_up})" if self.warm_up else ""
        return f"PowerSGD of rank {self.rank}{warm_up}"


class TopK(PlanPart, frozen=True, tag="top-k"):
    """The elements of each tensor that are largest in size, with their places.

    Aji and Heafield, Sparse Communication for Distributed Gradient Descent (2017).

    Attributes:
        fraction: of the elements, above 0 and at most 1; at least one is sent of each tensor.

    Raises:
        OptionError: another number.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise OptionError(
                "`fraction` of TopK must be a number above 0, and at most 1.",
                received=f"fraction={self.fraction!r}",
                fix="Use 0.01 for a hundredth of the elements.",
            )

    def count(self, size: int) -> int:
        """Elements that are sent of so many."""
        return min(size, max(1, round(self.fraction * size)))

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes that a host sends of a tensor in float32."""
        return (_FLOAT_BYTES + _INDEX_BYTES) * self.count(math.prod(shape))

    def __str__(self) -> str:
        return f"the largest {100 * self.fraction:g} %"


Compression = BFloat16 | Int8 | PowerSGD | TopK


def warm_up(compression: Compression) -> int:
    """Steps that are sent uncompressed, before the first that is compressed."""
    return compression.warm_up if isinstance(compression, PowerSGD) else 0


def compression_of(compression: Compression | None, shape: Sequence[int]) -> Compression | None:
    """How a tensor is compressed; None if it is sent uncompressed, which is no larger."""
    is_less = compression and compression.num_bytes(shape) < _FLOAT_BYTES * math.prod(shape)
    return compression if is_less else None


def num_bytes(compression: Compression | None, shape: Sequence[int]) -> int:
    """Bytes that a host sends of a tensor in float32."""
    found = compression_of(compression, shape)
    return _FLOAT_BYTES * math.prod(shape) if found is None else found.num_bytes(shape)


_BY_NAME: dict[object, Compression] = {"bf16": BFloat16(), "int8": Int8()}


def check_carrier(problems: Problems, compression: Compression | None, engine: object) -> None:
    """Note an engine that cannot compress."""
    if compression is not None and engine is not None:
        problems.add(
            "Lockstep's own channels compress what hosts send; other engines do not.",
            received=f"compression={compression} with engine={engine!r}",
            fix="Leave `engine` out.",
        )


def find_compression(problems: Problems, asked: object) -> Compression | None:
    """The compression that ``compression=`` means; anything else is noted as a problem."""
    if asked is None or isinstance(asked, Compression):
        return asked
    found = _BY_NAME.get(asked) if isinstance(asked, str) else None
    if found is None:
        problems.add(
            '`compression` must be "bf16", "int8", a lockstep.PowerSGD or a lockstep.TopK.',
            received=f"compression={asked!r}",
            fix="Use lockstep.PowerSGD(rank=4), or leave it out for an exact result.",
        )
    return found
