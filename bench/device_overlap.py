"""How much of the exchange of gradients runs while an accelerator still goes backward: a trace.

Two ranks of a stand-in for accelerators (tests/stand_ins/accelerator), or of the host's own, train
a perceptron and exchange over gloo. For each step of rank 0 the trace has the time of its backward
pass, and of each bucket's transfer from its begin until gloo has it complete. Prints the share of
the transfers' time, and of their bytes, that lies in backward. Run:
``PYTHONPATH=tests/stand_ins/accelerator:. python bench/device_overlap.py``
"""

import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.comm.collectives.overlapped_reduce import OverlappedReduce
from lockstep.comm.transports.process_group_transport import ProcessGroupTransport
from lockstep.parallel.loss.share_losses import ShareLoss
from tests.devices.found import ranks_on_devices

WIDTH, DEPTH, BATCH, STEPS = 1024, 10, 512, 20


class Trace:
    """Intervals of a step, in seconds."""

    def __init__(self) -> None:
        self.backward = (0.0, 0.0)
        self.transfers: list[list[float]] = []  # begin, end and bytes
        self._undo: list[tuple[Any, str, Any]] = []

    def overlap(self) -> tuple[float, float]:
        """The shares of the transfers' time and of their bytes that lie in backward."""
        first, last = self.backward
        total = sum(end - begin for begin, end, _ in self.transfers)
        within = sum(
            max(0.0, min(end, last) - max(begin, first)) for begin, end, _ in self.transfers
        )
        sent = sum(size for *_, size in self.transfers)
        early = sum(size for begin, _, size in self.transfers if begin < last)
        return within / total, early / sent


def traced(steps: list[Trace]) -> None:
    """Note from now on what each step of this process does."""
    expect, begin_all = OverlappedReduce.expect, ProcessGroupTransport._begun
    backward, begin = ShareLoss.backward, ProcessGroupTransport.begin
    tags = [0]

    def expected(self: OverlappedReduce, num_rows: int) -> None:
        steps.append(Trace())
        expect(self, num_rows)

    def went_backward(self: ShareLoss, denominator: Any) -> None:
        start = time.perf_counter()
        backward(self, denominator)
        steps[-1].backward = (start, time.perf_counter())

    def tagged(self: ProcessGroupTransport, sends: Any, receives: Any, *, tag: int) -> Any:
        tags[0] = tag
        return begin(self, sends, receives, tag=tag)

    def begun(self: ProcessGroupTransport, into: Any, *others: Any) -> Any:
        entry = [time.perf_counter(), 0.0, float(len(into))]
        work = begin_all(self, into, *others)
        if tags[0]:
            steps[-1].transfers.append(entry)
            work.get_future().then(lambda _: entry.__setitem__(1, time.perf_counter()))
        return work

    for owner, name, function in (
        (OverlappedReduce, "expect", expected),
        (ShareLoss, "backward", went_backward),
        (ProcessGroupTransport, "begin", tagged),
        (ProcessGroupTransport, "_begun", begun),
    ):
        setattr(owner, name, function)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    trainer = lockstep.Trainer(
        nn.Sequential(*layers, nn.Linear(WIDTH, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        strategy=lockstep.MirroredStrategy(ranks_on_devices(2), engine="gloo"),
    )
    steps: list[Trace] = []
    traced(steps)
    x, y = torch.randn(BATCH * STEPS, WIDTH), torch.randint(0, 10, (BATCH * STEPS,))
    trainer.fit((x, y), batch_size=BATCH, verbose=0)
    found = [step.overlap() for step in steps[3:]]  # the first try the model
    in_time, in_bytes = (statistics.median(own) for own in zip(*found, strict=True))
    print(f"{len(found)} steps, {len(steps[-1].transfers)} buckets a step")
    print(f"in backward: {in_time:.2f} of the transfers' time")
    print(f"begun there: {in_bytes:.2f} of the bytes")


if __name__ == "__main__":
    main()
