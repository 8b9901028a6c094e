"""A process that loads one core, beside others that do the same.

``python -m lockstep.launch.health.core_load BEGIN SECONDS`` waits until the time BEGIN, copies for
so long, and prints bytes per second: those of the best part of the time, since other processes may
have been running in the others. Without arguments it prints a line, and then computes and copies
until it is ended, or its parent is.
"""

import os
import sys
import time
from collections.abc import Callable

import numpy as np

_SIZE = 384  # of a matrix: three of them fit into a core's second cache
_PARTS = 5
_ELEMENTS = 1 << 22  # of a copy, which does not


def measure_copies(begin: float, seconds: float) -> None:
    """Copy, and print how much."""
    values, copied = np.ones(_ELEMENTS, np.float32), np.empty(_ELEMENTS, np.float32)

    def copy() -> None:
        np.copyto(copied, values)

    copy()
    time.sleep(max(begin - time.time(), 0.0))
    copies = max(_rate(copy, seconds / _PARTS) for _ in range(_PARTS))
    sys.stdout.write(f"{copies * values.nbytes}\n")


def _rate(work: Callable[[], None], seconds: float) -> float:
    began, count = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        work()
        count += 1
    return count / took


def keep_busy() -> None:
    """Work as a training does, with products and passes over memory, while the parent lives."""
    matrix = np.ones((_SIZE, _SIZE), np.float32)
    values, copied = np.ones(_ELEMENTS, np.float32), np.empty(_ELEMENTS, np.float32)
    product, parent = np.empty_like(matrix), os.getppid()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while os.getppid() == parent:
        for _ in range(8):
            np.matmul(matrix, matrix, out=product)
        np.add(values, 1.0, out=copied)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure_copies(float(sys.argv[1]), float(sys.argv[2]))
    else:
        keep_busy()
