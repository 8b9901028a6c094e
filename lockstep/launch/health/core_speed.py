"""How fast this process computes and copies for a while, beside others that do the same.

``python -m lockstep.launch.health.core_speed BEGIN SECONDS`` waits until the time BEGIN, works for
so long, and prints rounds per second and bytes copied per second: those of the best part of the
time, since other processes may have been running in the others.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

_SIZE = 384  # of a matrix: three of them fit into a core's second cache
_PARTS = 5
_ELEMENTS = 1 << 22  # of a copy, which does not


def main(begin: float, seconds: float) -> None:
    """Work, and print how much."""
    matrix = np.ones((_SIZE, _SIZE), np.float32)
    values, copied = np.ones(_ELEMENTS, np.float32), np.empty(_ELEMENTS, np.float32)
    product = np.empty_like(matrix)

    def compute() -> None:
        for _ in range(8):
            np.matmul(matrix, matrix, out=product)
        np.add(values, 1.0, out=copied)

    def copy() -> None:
        np.copyto(copied, values)

    compute()
    copy()
    time.sleep(max(begin - time.time(), 0.0))
    rounds = _per_second(compute, seconds / 2)
    copies = _per_second(copy, seconds / 2)
    sys.stdout.write(f"{rounds} {copies * values.nbytes}\n")


def _per_second(work: Callable[[], None], seconds: float) -> float:
    return max(_rate(work, seconds / _PARTS) for _ in range(_PARTS))


def _rate(work: Callable[[], None], seconds: float) -> float:
    began, count = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        work()
        count += 1
    return count / took


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
