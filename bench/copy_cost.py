"""What copies in the memory of another host cost: two hosts on the loopback interface.

The wide MLP 784-4096-4096-10 with Adam, one replica on each host: 240 MB of weights and slots. Of
each copy the table has the seconds that training waited for it (all that a rank alone has is
gathered, then it is copied), those in which it was sent, and by how much longer the steps
took that it touched than the median of the others. That, by the time from one copy to the next that
their pace keeps, is what they cost. To have many in a short time, they may take ten times as much
of it here.

Run: ``python bench/copy_cost.py [--steps 200]``
"""

import argparse
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nets import NETS

import lockstep
from lockstep.train.checkpointing.state_transfer import StateSender
from lockstep.train.fault_tolerance import overhead_budget
from lockstep.train.fault_tolerance.copies import Copies

NET = NETS["wide"]
MORE_OFTEN = 10
FIRST_STEP = 5  # the ones before take new memory


class StepClock(lockstep.Callback):
    """Notes when steps end."""

    is_observer = True

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.times.append(time.monotonic())


def host(num_steps: int, folder: str) -> None:
    clock = StepClock()
    taken: list[tuple[float, float]] = []  # from when training waited, until when
    sent: list[tuple[float, float]] = []
    take, send = Copies.take, StateSender._send

    def timed_take(self: Copies, resume: Any, began: float | None = None) -> None:
        take(self, resume, began)
        assert began is not None
        taken.append((began, time.monotonic()))

    def timed_send(self: StateSender, tree: Any, began: float) -> None:
        now = time.monotonic()
        send(self, tree, began)
        sent.append((now, time.monotonic()))

    Copies.take = timed_take  # type: ignore[method-assign]
    StateSender._send = timed_send  # type: ignore[method-assign]
    share, overhead_budget.PART = overhead_budget.PART, MORE_OFTEN * overhead_budget.PART
    torch.set_num_threads(1)
    trainer = lockstep.Trainer(
        NET.make_model(),
        loss=NET.loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3, fused=True),
        strategy=lockstep.MultiWorkerMirroredStrategy(devices_per_host=1),
        callbacks=[clock],
    )
    trainer.fit(
        NET.make_data(num_steps * NET.batch_size),
        batch_size=NET.batch_size,
        verbose=0,
        restarts=1,
        checkpoint=lockstep.Checkpoint(folder),
    )
    if taken:
        print(report(clock.times, taken, sent[1:], share), flush=True)
    trainer.close()


def report(
    ends: list[float],
    taken: list[tuple[float, float]],
    sent: list[tuple[float, float]],
    share: float,
) -> str:
    steps = [*zip(ends[FIRST_STEP - 1 :], ends[FIRST_STEP:], strict=False)]
    copies = [(begin, end) for (begin, _), (_, end) in zip(taken, sent, strict=False)]
    copies = [one for one in copies if one[0] > steps[0][0] and one[1] < steps[-1][1]]
    lengths: dict[bool, list[float]] = {True: [], False: []}
    for begin, end in steps:
        is_touched = any(begin < stop and start < end for start, stop in copies)
        lengths[is_touched].append(end - begin)
    usual = statistics.median(lengths[False])
    longer = sum(lengths[True]) - usual * len(lengths[True])
    counted = sum(stop - start for start, stop in copies)
    return (
        f"{len(steps)} steps of {1e3 * usual:.0f} ms, {len(copies)} copies; each: training waited "
        f"{1e3 * statistics.median(end - begin for begin, end in taken):.0f} ms, sent in "
        f"{1e3 * statistics.median(end - begin for begin, end in sent):.0f} ms, steps longer by "
        f"{1e3 * longer / len(copies):.0f} ms in all; one every {counted / len(copies) / share:.1f}"
        f" s, so {100 * share * longer / counted:.2f} % of the time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder:
        host(asked.steps, asked.folder)
        return
    with tempfile.TemporaryDirectory() as name, socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        sock.close()
        secret = Path(name) / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex())
        hosts = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "lockstep", "run", "--hosts", "2"),
                    *("--host-index", str(index), "--devices", "1"),
                    *("--rendezvous", f"127.0.0.1:{port}", "--secret-file", str(secret)),
                    *(__file__, "--steps", str(asked.steps), "--folder", f"{name}/run"),
                ]
            )
            for index in range(2)
        ]
        assert [one.wait() for one in hosts] == [0, 0]


if __name__ == "__main__":
    main()
