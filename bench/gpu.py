"""What accelerators do: tests, and speed against hand-written loops; writes ``docs/gpu.md``.

Every part is a process with a time limit of its own, and all of them together take 8 minutes at
most: machines with GPUs are lent for short. A part that fails or runs out of time says so in the
report, and the others are not held up. Run: ``python bench/gpu.py --report docs/gpu.md``; on a
machine without a GPU ``--tiny`` shows that it runs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent

_WARM_STEPS = 4

# Seconds that each part may take.
LIMITS = {"tests": 150, "gpt": 190, "cnn": 70, "ranks": 60}

Figures = dict[str, Any]

# --- the parts, each in a process of its own ------------------------------------------------------


class Clock:
    """Times the steps after the first few, in which things are compiled and memory is found.

    Args:
        steps: to be timed.
    """

    def __init__(self, steps: int) -> None:
        self.first, self.last = _WARM_STEPS, _WARM_STEPS + steps
        self._times: list[float] = []

    def __call__(self, done: int) -> None:
        """So many steps have been asked for."""
        if done in (self.first, self.last):
            synchronize()
            self._times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of a step."""
        began, ended = self._times
        return (ended - began) / (self.last - self.first)


def synchronize() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# Makes as many steps as a clock has, and tells it of each.
Train = Callable[[Clock], None]


def measured(train: Train, steps: int) -> Figures:
    """Seconds of a step, the less of two runs, and the most memory that tensors took."""
    import torch

    has_device = torch.accelerator.is_available()
    if has_device:
        torch.accelerator.reset_peak_memory_stats()
    clocks = [Clock(steps), Clock(steps)]
    for clock in clocks:
        train(clock)
    peak = torch.accelerator.max_memory_allocated() if has_device else 0
    return {"seconds": min(clock.seconds for clock in clocks), "peak_bytes": peak}


def device_name() -> str:
    """The first accelerator, else the cores."""
    from lockstep.cluster.devices import discover

    found = discover().hosts[0].accelerators
    return found[0].name if found else "cpu"


def rows_for(inputs: Any, steps: int, batch_size: int) -> Any:
    """Which samples the steps train on."""
    import torch

    return torch.randint(len(inputs), (steps, batch_size), device=inputs.device)


def plain_loop(
    model: Any, loss_of: Callable[[Any, Any], Any], inputs: Any, batch_size: int, optimizer: Any
) -> Train:
    """A loop as one writes it by hand: bf16 autocast, a fused optimizer, no wait for the device."""
    import torch

    kind = inputs.device.type

    def train(clock: Clock) -> None:
        for step, rows in enumerate(rows_for(inputs, clock.last, batch_size)):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(kind, dtype=torch.bfloat16):
                loss = loss_of(model, rows)
            loss.backward()
            optimizer.step()
            clock(step + 1)

    return train


def fit(trainer: Any, data: Callable[[int], Any], batch_size: int) -> Train:
    """The same by a Trainer."""
    from lockstep import Callback

    class Telling(Callback):
        def __init__(self, clock: Clock) -> None:
            self.clock = clock

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.clock(batch + 1)

    def train(clock: Clock) -> None:
        trainer.callbacks = [Telling(clock)]
        trainer.fit(data(clock.last), batch_size=batch_size, shuffle=False, verbose=0)

    return train


def gpt(tiny: bool) -> Figures:
    """GPT-2 124M, 1,024 tokens, bf16, compiled."""
    import torch
    from gpu_nets import GPT, GPTSize, gpt_flops

    import lockstep

    small = GPTSize(layers=2, heads=2, width=64, context=32, words=512, batch_size=4)
    size = small if tiny else GPTSize()
    device, batch_size, steps = device_name(), size.batch_size, 2 if tiny else 12
    adam = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    tokens = torch.randint(size.words, (64, size.context + 1), device=device)

    def by_hand() -> Train:
        model = GPT(size).to(device)
        compiled = torch.compile(model)

        def loss_of(model: Any, rows: Any) -> Any:
            return compiled(tokens[rows, :-1], tokens[rows, 1:])

        return plain_loop(model, loss_of, tokens, batch_size, adam(model.parameters()))

    def by_fit(**options: Any) -> Train:
        trainer = lockstep.Trainer(
            GPT(size),
            loss=lockstep.OwnLoss(),
            optimizer=adam,
            strategy=lockstep.SingleDeviceStrategy(device),
            precision="bf16-mixed",
            compile=True,
            **options,
        )

        def data(count: int) -> Any:
            some = tokens[torch.arange(count * batch_size, device=device) % len(tokens)]
            return ((some[:, :-1], some[:, 1:]),)

        return fit(trainer, data, batch_size)

    torch.set_float32_matmul_precision("high")
    found = {"loop": alone(by_hand, steps), "fit": alone(by_fit, steps)}
    found["fit, unchecked"] = alone(partial(by_fit, on_nonfinite="ignore"), steps)
    per_step = batch_size * size.context
    for one in found.values():
        one["per_second"] = per_step / one["seconds"]
        one["flops"] = gpt_flops(size) * per_step / one["seconds"]
    return found


def cnn(tiny: bool) -> Figures:
    """ResNet-50, bf16, channels last, images of 224 x 224."""
    import torch
    from gpu_nets import resnet
    from torch import nn

    import lockstep

    depths, width, side, batch_size = ((1, 1), 8, 32, 4) if tiny else ((3, 4, 6, 3), 64, 224, 128)
    device, steps = device_name(), 2 if tiny else 10
    images = torch.randn(256 if not tiny else 16, 3, side, side, device=device)
    labels = torch.randint(1000, (len(images),), device=device)
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=device.startswith("cuda"))
    criterion = nn.CrossEntropyLoss()

    def model() -> nn.Module:
        net: nn.Module = resnet(tuple(depths), width)
        return net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def by_hand() -> Train:
        net = model()

        def loss_of(net: Any, rows: Any) -> Any:
            given = images[rows].contiguous(memory_format=torch.channels_last)
            return criterion(net(given).float(), labels[rows])

        return plain_loop(net, loss_of, images, batch_size, sgd(net.parameters()))

    def by_fit() -> Train:
        trainer = lockstep.Trainer(
            model(),
            loss=criterion,
            optimizer=sgd,
            strategy=lockstep.MirroredStrategy([device]),
            precision="bf16-mixed",
        )

        def data(count: int) -> Any:
            some = torch.arange(count * batch_size, device=device) % len(images)
            return images[some], labels[some]

        return fit(trainer, data, batch_size)

    found = {"loop": alone(by_hand, steps), "fit": alone(by_fit, steps)}
    for one in found.values():
        one["per_second"] = batch_size / one["seconds"]
    return found


def ranks(tiny: bool) -> Figures:
    """1, 2 and 4 ranks on one device, which exchange by way of host memory; a wide MLP, float32."""
    import torch
    from torch import nn

    import lockstep

    width, batch_size, steps = (64, 8, 2) if tiny else (4096, 1024, 8)
    device = device_name()
    inputs = torch.randn(4 * batch_size, 784)
    labels = torch.randint(10, (len(inputs),))
    found = {}
    for count in (1, 2, 4):
        layers = (nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        trainer = lockstep.Trainer(
            nn.Sequential(*layers, nn.Linear(width, 10)),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-3),
            strategy=lockstep.MirroredStrategy([device] * count, engine="gloo"),
        )

        def data(number: int) -> Any:
            some = torch.arange(number * batch_size) % len(inputs)
            return inputs[some], labels[some]

        found[f"{count} ranks"] = measured(fit(trainer, data, batch_size), steps)
        found[f"{count} ranks"]["per_second"] = batch_size / found[f"{count} ranks"]["seconds"]
        trainer.close()
    return found


def alone(make: Callable[[], Train], steps: int) -> Figures:
    """A contender's figures; its memory is what it takes beside what is there without it."""
    import gc

    import torch

    has_device = torch.accelerator.is_available()
    before = torch.accelerator.memory_allocated() if has_device else 0
    figures = measured(make(), steps)
    figures["peak_bytes"] -= before
    torch.compiler.reset()
    gc.collect()
    return figures


PARTS: dict[str, Callable[[bool], Figures]] = {"gpt": gpt, "cnn": cnn, "ranks": ranks}

# --- all of them ----------------------------------------------------------------------------------


def run_part(name: str, tiny: bool) -> Figures:
    """A part's figures, or what became of it."""
    command = [sys.executable, __file__, "--part", name, *(["--tiny"] if tiny else [])]
    code, output = run(command, LIMITS[name])
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        found: Figures = json.loads(lines[-1])
        return found
    return {"failed": trouble(code, output, LIMITS[name])}


def run_tests() -> Figures:
    """What the tests on devices say."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough"]
    code, output = run([*command, "tests/devices"], LIMITS["tests"])
    counts = re.findall(r"(\d+) (passed|failed|error|errors|skipped)", output)
    failed = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
    found: Figures = {word: int(number) for number, word in counts}
    if code not in (0, 1) or not counts:
        found["failed to end"] = trouble(code, output, LIMITS["tests"])
    return {**found, "names": failed}


def run(command: list[str], limit: float) -> tuple[int, str]:
    """Exit status and output of a process and all that it starts; -1 where time was up."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, *_path())))}
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=limit)[0]
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return -1, process.communicate()[0]


def _path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def trouble(code: int, output: str, limit: float) -> str:
    """In a line."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    return f"no result within {limit:.0f} s" if code == -1 else f"exit status {code}: {last[:200]}"


def hardware() -> list[str]:
    """What it all ran on."""
    script = (
        "import torch\n"
        "from lockstep.cli.device_examination import accelerator_lines, backend_line\n"
        "from lockstep.cluster.devices import discover, processor_name\n"
        "host = discover().hosts[0]\n"
        "print('; '.join(accelerator_lines()) or f'No accelerator. {host.lack}')\n"
        "print(f'torch {torch.__version__}, CUDA {torch.version.cuda}; {backend_line()}')\n"
        "print(f'{host.num_cores} cores of {processor_name()}')\n"
    )
    return [line for line in run([sys.executable, "-c", script], 60)[1].splitlines() if line]


def table(figures: Figures, unit: str, base: str) -> list[str]:
    """A part's figures, against one of them."""
    if "failed" in figures:
        return [f"Not measured: {figures['failed']}."]
    rows = [f"| | {unit} | of {base} | memory, MiB | of {base} |", "|---|---|---|---|---|"]
    first = figures[base]
    for name, one in figures.items():
        memory = one["peak_bytes"] / max(first["peak_bytes"], 1)
        rows.append(
            f"| {name} | {one['per_second']:,.0f} | {one['per_second'] / first['per_second']:.3f}x "
            f"| {one['peak_bytes'] / 2**20:,.0f} | {memory:.3f}x |"
        )
    return rows


def report(found: dict[str, Figures], about: list[str], tiny: bool) -> str:
    """The page."""
    tests = found.get("tests", {})
    words = ", ".join(f"{n} {word}" for word, n in tests.items() if isinstance(n, int))
    lines = [
        "# GPUs",
        "",
        "Written by `make gpu` (`bench/gpu.py`), which runs the tests of `tests/devices` and",
        "measures. Only ratios within one run count.",
        "",
        *(f"- {line}" for line in about),
        *(["- **A rehearsal with tiny nets: the figures mean nothing.**"] if tiny else []),
        "",
        "## Tests",
        "",
        "Parity in float64 with a plain loop on the device, bits over numbers of ranks, kills:",
        f"{words or 'not run'}.",
        "CI runs the core of them on an accelerator that is none (`tests/stand_ins/accelerator`):",
        "two devices of torch's PrivateUse1 type, whose memory is the host's but protected.",
        *(f"- failed: `{name}`" for name in tests.get("names", [])),
        *([f"- {tests['failed to end']}"] if "failed to end" in tests else []),
    ]
    if "gpt" in found:
        lines += [
            "",
            "## GPT-2 124M, 1,024 tokens, bf16, compiled",
            "",
            "A hand-written loop with torch.compile, autocast and fused AdamW; `fit` likewise,",
            'and with `on_nonfinite="ignore"`, which looks at no gradient.',
            "",
            *table(found["gpt"], "tokens/s", "loop"),
        ]
        if "failed" not in found["gpt"]:
            parts = [f"{name} {one['flops'] / 1e12:,.1f}" for name, one in found["gpt"].items()]
            lines += ["", f"Teraflop/s: {', '.join(parts)}; an H200 has 989 in bf16."]
    if "cnn" in found:
        lines += [
            "",
            "## ResNet-50, bf16, channels last",
            "",
            *table(found["cnn"], "images/s", "loop"),
        ]
    if "ranks" in found:
        lines += [
            "",
            "## Several ranks on one device",
            "",
            "Wide MLP in float32; what ranks exchange goes by way of host memory (gloo).",
            "",
            *table(found["ranks"], "samples/s", "1 ranks"),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--parts", nargs="+", choices=LIMITS, default=list(LIMITS))
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options.tiny)), flush=True)
        return
    found: dict[str, Figures] = {}
    about = hardware()
    for name in options.parts:
        began = time.monotonic()
        found[name] = run_tests() if name == "tests" else run_part(name, options.tiny)
        print(f"{name}, {time.monotonic() - began:.0f} s: {found[name]}", flush=True)
        page = report(found, about, options.tiny)
        if options.report:  # after each part: what was measured stays, whatever comes
            options.report.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
