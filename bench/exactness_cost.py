"""What being exact costs: the proof before the first step, and losses taken on the whole batch.

Every round runs each variant once, beginning with another one; a ratio is within a round, and the
table shows the median over the rounds. The MLP 784-256-256-10 makes 100 steps with and without the
proof that all ranks compute the same, on two replicas and in two stages, its helpers started
before. The CNN trains with torch's cross entropy, whose mean is known, and with functions of a
user: the same formula by hand, which is seen to be a mean, and one that is taken on the whole
batch; without the first epoch, of which one step is made twice until that is known.

Run: ``python bench/exactness_cost.py [--rounds 9] [--parts proof loss]``
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from nets import NETS, Net
from torch import Tensor, nn

import lockstep
from lockstep.train.runtime.runner import Runner

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "two replicas": partial(lockstep.MirroredStrategy, 2),
    "two stages": partial(lockstep.PipelineStrategy, cuts=["2"], microbatches=4),
}
NUM_STEPS = 100
NUM_CNN_STEPS, NUM_CNN_EPOCHS = 12, 4


@contextmanager
def unproven() -> Iterator[None]:
    """Within the block ranks prove nothing."""
    own = Runner._prepare_proof
    Runner._prepare_proof = lambda *arguments: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Runner._prepare_proof = own  # type: ignore[method-assign]


def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy."""
    return (outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]).mean()


def of_the_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    """The root of the mean square of every sample's cross entropy."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none").square().mean().sqrt()


class EpochClock(lockstep.Callback):
    """Notes when epochs end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())


def seconds_of_fit(
    net: Net, strategy: lockstep.Strategy, loss: Any, num_steps: int, epochs: int = 1
) -> float:
    """Of a ``fit``, after a call that has started helpers and made the Plan.

    Of several epochs, all after the first.
    """
    clock = EpochClock()
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        strategy=strategy,
        callbacks=[clock],
    )
    data = net.make_data(num_steps * net.batch_size)
    trainer.evaluate(tuple(each[: net.batch_size] for each in data), batch_size=net.batch_size)
    begun = time.perf_counter()
    trainer.fit(data, epochs=epochs, batch_size=net.batch_size, verbose=0)
    trainer.close()
    return clock.times[-1] - (begun if epochs == 1 else clock.times[0])


def with_proof(strategy: str) -> float:
    net = NETS["mlp"]
    return seconds_of_fit(net, STRATEGIES[strategy](), net.loss, NUM_STEPS)


def without_proof(strategy: str) -> float:
    with unproven():
        return with_proof(strategy)


def of_cnn(loss: Any) -> float:
    strategy = lockstep.MirroredStrategy(2)
    return seconds_of_fit(NETS["cnn"], strategy, loss, NUM_CNN_STEPS, NUM_CNN_EPOCHS)


PARTS: dict[str, dict[str, tuple[Callable[[], float], Callable[[], float]]]] = {
    "proof": {
        f"proof, {name}": (partial(with_proof, name), partial(without_proof, name))
        for name in STRATEGIES
    },
    "loss": {
        name: (partial(of_cnn, loss), partial(of_cnn, nn.CrossEntropyLoss()))
        for name, loss in {
            "loss by hand": by_hand,
            "loss on the whole batch": of_the_batch,
        }.items()
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| what | with, s | without, s | ratio | least to most |\n|---|---|---|---|---|")
    for name, pair in (row for part in asked.parts for row in PARTS[part].items()):
        taken: list[list[float]] = [[], []]
        for number in range(asked.rounds + 1):
            for side in (0, 1) if number % 2 else (1, 0):
                taken[side].append(pair[side]())
        ratios = [one / other for one, other in zip(taken[0][1:], taken[1][1:], strict=True)]
        medians = [statistics.median(each[1:]) for each in taken]  # the first round warms up
        told = [f"{one:.3f}" for one in (*medians, statistics.median(ratios))]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print("| " + " | ".join([name, *told, spread]) + " |", flush=True)


if __name__ == "__main__":
    main()
