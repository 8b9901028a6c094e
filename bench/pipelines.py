"""Two stages on two cores: Lockstep's pipelines against torch.distributed.pipelining.

Both cut the models in the same place, into the same microbatches, and use one thread per process.
Every round runs each contender once per task, in a process of its own, and begins with another one;
ratios are taken within a round, and medians over the rounds. Run: ``make bench-pipelines``, or a
part: ``python bench/pipelines.py --tasks gpt-8 --rounds 1 --seconds 1``.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import batches, loop
from nets import GPT, NETS, Net
from torch import Tensor, nn
from torch_contenders import FUSED_ADAM, NUM_RANKS, in_two_processes

Figures = dict[str, float]


# --- what is trained ------------------------------------------------------------------------------


def convolve(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(num_out, num_out, 3, padding=1),
        nn.SiLU(),
    )


class Down(nn.Module):
    """The first half of a U-Net: sends three tensors to the second."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = convolve(3, width)
        self.second = convolve(width, 2 * width)
        self.bottom = convolve(2 * width, 4 * width)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        full = self.first(images)
        half = self.second(nn.functional.max_pool2d(full, 2))
        return full, half, self.bottom(nn.functional.max_pool2d(half, 2))


class Up(nn.Module):
    """The second half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rise_half = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.mix_half = convolve(4 * width, 2 * width)
        self.rise_full = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.mix_full = convolve(2 * width, width)
        self.paint = nn.Conv2d(width, 3, 1)

    def forward(self, full: Tensor, half: Tensor, bottom: Tensor) -> Tensor:
        half = self.mix_half(torch.cat([half, self.rise_half(bottom)], dim=1))
        painted: Tensor = self.paint(self.mix_full(torch.cat([full, self.rise_full(half)], dim=1)))
        return painted


class UNet(nn.Module):
    """The two halves, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = Down(width)
        self.up = Up(width)

    def forward(self, images: Tensor) -> Tensor:
        painted: Tensor = self.up(*self.down(images))
        return painted


def unet() -> nn.Module:
    torch.manual_seed(0)
    return UNet(16)


def pictures(num_samples: int) -> tuple[Tensor, Tensor]:
    clean = torch.randn(num_samples, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    return clean + 0.1, clean


class FirstHalf(nn.Module):
    """Embeddings and the first blocks of a GPT: what comes before the cut."""

    def __init__(self, model: GPT, num_blocks: int) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position
        self.blocks = model.blocks[:num_blocks]

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        return x


def halves_of_gpt(model: Any) -> list[nn.Module]:
    return [FirstHalf(model, 3), nn.Sequential(*model.blocks[3:], model.norm, model.head)]


class WithDenseGradients(nn.Module):
    """What torch's pipelines send must be contiguous; gradients of a concatenation are not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: Tensor) -> Tensor:
        dense = [_Dense.apply(tensor) for tensor in tensors]  # type: ignore[no-untyped-call]
        output: Tensor = self.module(*dense)
        return output


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def halves_of_unet(model: Any) -> list[nn.Module]:
    return [model.down, WithDenseGradients(model.up)]


@dataclass(frozen=True)
class Task:
    """A net, cut in two.

    Attributes:
        net: what is trained.
        cut: name of the module at which the second stage begins.
        halves: the two parts as modules of their own, as torch wants them.
        microbatches: of a batch.
        schedules: of Lockstep.
    """

    net: Net
    cut: str
    halves: Callable[[Any], list[nn.Module]]
    microbatches: int
    schedules: tuple[str, ...]


UNET = Net("U-Net, 64 x 64, 16 wide", 64, 128, unet, pictures, nn.functional.mse_loss)
TASKS = {
    "gpt-8": Task(NETS["gpt"], "blocks.3", halves_of_gpt, 8, ("1f1b", "zb-h1")),
    "gpt-4": Task(NETS["gpt"], "blocks.3", halves_of_gpt, 4, ("1f1b", "zb-h1", "zb-h2")),
    "unet-4": Task(UNET, "up", halves_of_unet, 4, ("1f1b", "zb-h1")),
}
BASE = "torch 1f1b"


# --- contenders -----------------------------------------------------------------------------------


def lockstep(task: Task, seconds: float, schedule: str) -> Figures:
    from lockstep_contenders import EpochClock

    import lockstep

    clock = EpochClock(seconds)
    trainer = lockstep.Trainer(
        task.net.make_model(),
        loss=task.net.loss,
        optimizer=FUSED_ADAM,
        strategy=lockstep.PipelineStrategy(
            cuts=[task.cut], microbatches=task.microbatches, schedule=schedule
        ),
        callbacks=[clock],
    )
    data = task.net.make_data(task.net.num_samples)
    trainer.fit(data, epochs=100_000, batch_size=task.net.batch_size, verbose=0)
    samples = (len(clock.times) - 1) * task.net.num_samples
    return {
        "samples_per_second": samples / (clock.times[-1] - clock.times[0]),
        "loss": clock.loss,
        "bytes": clock.bytes,
    }


def torch_pipeline(task: Task, seconds: float) -> Figures:
    name = next(name for name, one in TASKS.items() if one is task)
    return in_two_processes(name, seconds, train_torch_pipeline)


def train_torch_pipeline(name: str, rank: int, seconds: float) -> Figures:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    task = TASKS[name]
    half = task.halves(task.net.make_model())[rank]
    optimizer = FUSED_ADAM(half.parameters())
    stage = PipelineStage(half, rank, NUM_RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, task.microbatches, loss_fn=task.net.loss)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        return float(sum(loss.item() for loss in losses))

    return loop(task.net, step, batches(task.net, 0, 1), seconds)


def one_process(task: Task, seconds: float) -> Figures:
    """The same microbatches, one after the other, with torch's own two threads."""
    torch.set_num_threads(2)
    model = task.net.make_model()
    optimizer = FUSED_ADAM(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        parts = zip(inputs.chunk(task.microbatches), targets.chunk(task.microbatches), strict=True)
        for part, wanted in parts:
            loss = task.net.loss(model(part), wanted) / task.microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return loop(task.net, step, batches(task.net, 0, 1), seconds)


def contenders(task: Task) -> dict[str, Callable[[Task, float], Figures]]:
    ours = {
        f"lockstep {schedule}": partial(lockstep, schedule=schedule) for schedule in task.schedules
    }
    return {**ours, BASE: torch_pipeline, "one process, 2 threads": one_process}


# --- rounds ---------------------------------------------------------------------------------------


def measure(name: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Samples per second of each contender, by round."""
    names = list(contenders(TASKS[name]))
    found: dict[str, list[float]] = {contender: [] for contender in names}
    for number in range(rounds):
        first = number % len(names)
        for contender in names[first:] + names[:first]:
            command = [sys.executable, __file__, "--one", name, contender]
            done = subprocess.run(
                [*command, "--seconds", str(seconds)], capture_output=True, text=True, timeout=180
            )
            if done.returncode != 0:
                raise SystemExit(f"{contender} failed on {name}:\n{done.stderr}")
            figures = json.loads(done.stdout.splitlines()[-1])
            found[contender].append(figures["samples_per_second"])
            print(f"{name} round {number + 1}/{rounds} {contender}: {found[contender][-1]:.1f}")
    return found


def table(name: str, found: dict[str, list[float]]) -> str:
    task = TASKS[name]
    lines = [
        f"### {task.net.title}, batch {task.net.batch_size}, {task.microbatches} microbatches",
        "",
        "| contender | samples/s | min to max | to torch's 1F1B |",
        "| --- | ---: | ---: | ---: |",
    ]
    for contender, speeds in found.items():
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(speeds, found[BASE], strict=True)
        )
        lines.append(
            f"| {contender} | {statistics.median(speeds):.1f} | {min(speeds):.1f} to "
            f"{max(speeds):.1f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run, less warm-up")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--report", type=Path, help="Markdown file to write")
    parser.add_argument("--one", nargs=2, metavar=("TASK", "CONTENDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task = TASKS[options.one[0]]
        print(json.dumps(contenders(task)[options.one[1]](task, options.seconds)))
        return
    tables = [table(name, measure(name, options.rounds, options.seconds)) for name in options.tasks]
    print("\n\n".join(["", *tables]))
    if options.report:
        options.report.write_text("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
