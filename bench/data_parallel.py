"""Data parallel training on one host: Lockstep against other libraries, on the same cores.

Every round runs each contender once per net, in a process of its own, and begins with another one;
ratios are taken within a round, and medians over the rounds. Prints a table per net. Run:
``make bench``, or a part: ``python bench/data_parallel.py --nets mlp --rounds 1 --seconds 1``.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import report
from contenders import CONTENDERS, Figures, last_error
from measuring import descendants
from nets import NETS
from results import Results

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 180


def run(contender: str, net: str, seconds: float) -> Figures | str:
    """Its figures, or why there are none."""
    command = [sys.executable, str(HERE / "contenders.py"), contender, net]
    process = subprocess.Popen(
        [*command, "--seconds", str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS + seconds)
    except subprocess.TimeoutExpired:
        return f"did not end within {TIMEOUT_SECONDS + seconds:.0f} s"
    finally:
        end_family(process.pid)
        process.wait()
    if process.returncode != 0:
        return last_error(errors) if errors.strip() else f"ended with {process.returncode}"
    figures: Figures = json.loads(output.splitlines()[-1])
    return figures


def end_family(leader: int) -> None:
    """End what a contender may have left behind, on errors and interrupts, too."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for pid in descendants(leader):  # torchrun's are in sessions of their own
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def installed(names: list[str]) -> list[str]:
    """Those that can run here; prints the others."""
    kept = []
    for name in names:
        missing = CONTENDERS[name].missing()
        if missing:
            print(f"left out: {name} (not installed: {', '.join(missing)})")
        else:
            kept.append(name)
    return kept


def measure(
    nets: list[str], contenders: list[str], rounds: int, seconds: float, output: Path
) -> Results:
    results = Results(rounds, seconds)
    for net in nets:
        taking_part = [name for name in contenders if net in CONTENDERS[name].nets]
        for number in range(rounds):
            first = number % len(taking_part)
            for name in taking_part[first:] + taking_part[:first]:
                figures = run(name, net, seconds)
                results.add(net, name, number, figures)
                print(f"{net} round {number + 1}/{rounds} {name}: {shown(figures)}", flush=True)
                results.write(output)
    return results


def shown(figures: Figures | str) -> str:
    if isinstance(figures, str):
        return f"FAILED: {figures}"
    memory = f", {figures['bytes'] / 1e6:,.0f} MB" if "bytes" in figures else ""
    return f"{figures['samples_per_second']:,.0f} samples/s{memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run, less warm-up")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "data_parallel.json")
    parser.add_argument("--report", type=Path, help="Markdown file whose section is rewritten")
    parser.add_argument("--from-output", action="store_true", help="measure nothing, only report")
    options = parser.parse_args()
    if options.from_output:
        results = Results.read(options.output)
    else:
        names = installed(options.contenders)
        results = measure(options.nets, names, options.rounds, options.seconds, options.output)
    for net in results.nets():
        print(f"\n{NETS[net].title}, batch {NETS[net].batch_size}\n\n{report.table(results, net)}")
    if options.report:
        report.rewrite(options.report, results)


if __name__ == "__main__":
    main()
