"""What accelerators do: tests, and speed against hand-written loops; writes ``docs/gpu.md``.

Every part is a process with a time limit of its own, and all of them together take 8 minutes at
most: machines with GPUs are lent for short. A part or contender that fails or runs out of time says
so in the report, and the others are not held up. Run: ``python bench/gpu.py --report docs/gpu.md``;
on a machine without a GPU ``--tiny`` shows that it runs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parent.parent

# Seconds that each part may take.
LIMITS = {"gpt": 160, "cnn": 60, "mlp": 45, "keras": 50, "tests": 130, "ranks": 50}

# Of a contender by name; or of the tests.
Figures = dict[str, Any]

# --- what is run ----------------------------------------------------------------------------------


def run_part(name: str, tiny: bool) -> Figures:
    """A part's figures by contender, and what became of it where it did not end."""
    command = [sys.executable, __file__, "--part", name, *(["--tiny"] if tiny else [])]
    code, output = run(command, LIMITS[name])
    told = [json.loads(line) for line in output.splitlines() if line.startswith('{"contender"')]
    found: Figures = {one.pop("contender"): one for one in told}
    if code:
        found["the rest"] = {"failed": trouble(code, output, LIMITS[name])}
    return found


def run_tests() -> Figures:
    """What the tests on devices say."""
    workers = str(min(6, os.cpu_count() or 1))
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers]
    # It warns beside xdist, and warnings are errors here.
    command += ["-p", "no:benchmark"]
    code, output = run([*command, "-m", "not thorough", "tests/devices"], LIMITS["tests"])
    counts = re.findall(r"(\d+) (passed|failed|error|errors|skipped)", output)
    found: Figures = {word: int(number) for number, word in counts}
    if code not in (0, 1) or not counts:
        found["failed to end"] = trouble(code, output, LIMITS["tests"])
    return {**found, "names": re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)}


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


# --- the page -------------------------------------------------------------------------------------


class Section(NamedTuple):
    """Of the page.

    Attributes:
        title: of the part.
        about: what is compared.
        unit: of its figures.
        base: the contender to which the others are compared.
    """

    title: str
    about: str
    unit: str
    base: str


SECTIONS = {
    "gpt": Section(
        "GPT-2 124M, 1,024 tokens, batch 32, bf16, compiled",
        "A hand-written loop with torch.compile, autocast and fused AdamW; `fit` with "
        '`compile=True`, and with `on_nonfinite="ignore"`, which looks at no gradient; the loop '
        "with `CrossReplicaOptimizer`; DDP and FSDP2 with one process. The last two show what "
        "their own work costs: nothing is exchanged.",
        "tokens/s",
        "loop",
    ),
    "cnn": Section(
        "ResNet-50, batch 128, bf16, channels last",
        "The same on images of 224 x 224; nothing is compiled.",
        "images/s",
        "loop",
    ),
    "mlp": Section(
        "MLP 784-512-512-10, batch 512, float32",
        "A step so short that the host's work is what is timed.",
        "samples/s",
        "loop",
    ),
    "keras": Section(
        "A Keras CNN, batch 256, float32",
        "`fit` of Keras on torch, and under `SingleDeviceStrategy`; images of 32 x 32.",
        "images/s",
        "Keras",
    ),
    "ranks": Section(
        "Several ranks on one device",
        "Wide MLP in float32; what ranks exchange goes by way of host memory (gloo).",
        "samples/s",
        "1 rank",
    ),
}


def section(part: str, figures: Figures) -> list[str]:
    """A part's figures, and how they compare with one of them."""
    one = SECTIONS[part]
    lines = [
        "",
        f"## {one.title}",
        "",
        one.about,
        "",
        f"| | {one.unit} | of {one.base} | memory, MiB | of {one.base} | host waits in a step |",
        "|---|---|---|---|---|---|",
    ]
    measured = {name: own for name, own in figures.items() if "failed" not in own}
    base = measured.get(one.base, next(iter(measured.values()), {}))
    lines += [row(name, own, base) for name, own in measured.items()]
    lines += [
        f"\nNot measured: {name}. {own['failed']}"
        for name, own in figures.items()
        if "failed" in own
    ]
    flops = [
        f"{name} {own['flops_each'] * own['per_second'] / 1e12:,.1f}"
        for name, own in measured.items()
        if "flops_each" in own
    ]
    if flops:
        lines += ["", f"Teraflop/s: {', '.join(flops)}; an H100 or H200 has 989 in bf16, dense."]
    return lines


def row(name: str, own: Mapping[str, float], base: Mapping[str, float]) -> str:
    """Of a contender."""
    memory = own["peak_bytes"] / max(base["peak_bytes"], 1)
    waits = f"{own['waits']:.1f}" if "waits" in own else ""
    return (
        f"| {name} | {own['per_second']:,.0f} | {own['per_second'] / base['per_second']:.3f}x "
        f"| {own['peak_bytes'] / 2**20:,.0f} | {memory:.3f}x | {waits} |"
    )


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
    for part in SECTIONS:
        if part in found:
            lines += section(part, found[part])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", choices=SECTIONS)
    parser.add_argument("--parts", nargs="+", choices=LIMITS, default=list(LIMITS))
    options = parser.parse_args()
    if options.part:
        from gpu_parts import PARTS

        PARTS[options.part](options.tiny)
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
