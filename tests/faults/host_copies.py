"""A host of ``host_faults`` that takes a copy in memory every second, whatever copies cost.

With ``TORN`` among its variables host 0 is killed once, when half of a copy has left it.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))  # where its own launcher starts it
import host_faults

from lockstep.train.checkpointing.state_transfer import StateSender
from lockstep.train.fault_tolerance import overhead_budget

TORN = "LOCKSTEP_TEST_TORN"
_NUM_WHOLE = 5  # before: the sizes and contents of the beginning and of one copy, and a size


def break_off_once(mark: Path) -> None:
    """Be killed while a copy is sent.

    Args:
        mark: a file that says that it has happened.
    """
    put, num_sent = StateSender._put, 0

    def put_half(self: StateSender, *parts: bytes | memoryview) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent <= _NUM_WHOLE or mark.exists():
            put(self, *parts)
            return
        message = b"".join(parts)
        put(self, message[: len(message) // 2])
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    StateSender._put = put_half  # type: ignore[assignment]


if __name__ == "__main__":
    overhead_budget.PART = 1e9
    if TORN in os.environ:
        break_off_once(Path(sys.argv[2]) / "torn")
    host_faults.main(sys.argv[1:])
