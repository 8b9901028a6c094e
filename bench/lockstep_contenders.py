"""Contenders that train with Lockstep: mirrored over two cores, in fp32 or in mixed precision.

Run through ``bench/contenders.py``.
"""

import os
import time
from typing import Any

from measuring import descendants, pss_bytes
from nets import NETS
from torch_contenders import FUSED_ADAM, NUM_RANKS

import lockstep


class EpochClock(lockstep.Callback):
    """Counts epochs after the first, and stops when they fill the time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.times: list[float] = []
        self.loss = float("nan")
        self.bytes = float("nan")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        self.times.append(time.perf_counter())
        self.loss = logs["loss"]
        if len(self.times) > 1 and self.times[-1] - self.times[0] > self.seconds:
            # Now, while the helpers hold all that they train with.
            self.bytes = pss_bytes([os.getpid(), *descendants(os.getpid())])
            self.trainer.stop_training = True


def train(
    net_name: str,
    seconds: float,
    precision: Any = "fp32",
    engine: str | None = None,
    is_compiled: bool = False,
) -> dict[str, float]:
    net = NETS[net_name]
    clock = EpochClock(seconds)
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=net.loss,
        optimizer=FUSED_ADAM,
        strategy=lockstep.MirroredStrategy(NUM_RANKS, engine=engine),
        callbacks=[clock],
        precision=precision,
        compile=is_compiled,
    )
    data = net.make_data(net.num_samples)
    trainer.fit(data, epochs=100_000, batch_size=net.batch_size, verbose=0)
    samples = (len(clock.times) - 1) * net.num_samples
    return {
        "samples_per_second": samples / (clock.times[-1] - clock.times[0]),
        "loss": clock.loss,
        "bytes": clock.bytes,
    }
