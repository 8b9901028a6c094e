"""Compression and local SGD between two hosts at 100 Mbit/s, against sums that are exact.

The hosts are network namespaces of this machine, linked at a rate that the kernel keeps (``tbf``),
with one process each. All contenders train the wide MLP. Run as root: ``make bench-compression``.

python bench/compression.py                    samples/s, medians over the rounds, ratios to "sums"
python bench/compression.py --digits FOLDER    accuracy on MNIST, on a link without a limit, with
                                               another seed in each round

With ``--optimizer sgd`` all step by SGD with momentum (rate 0.1, momentum 0.9), for which PowerSGD
was made, and not by Adam.
"""

import argparse
import json
import secrets
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import last_error
from host_contenders import NET, PORT
from hosts import settings, task
from results import Results
from torch_contenders import FUSED_ADAM

import lockstep
from lockstep.data.mnist import load_mnist

sys.path.append(str(Path(__file__).parents[1]))  # the hosts of the tests are ours, too
from tests.netns import Hosts, NoHostsError, connected_hosts

HERE = Path(__file__).parent
NUM_HOSTS, TIMEOUT_SECONDS = 2, 900.0
EVERY = 16

Strategy = lockstep.Strategy


def together(**options: Any) -> Strategy:
    return lockstep.MultiWorkerMirroredStrategy(1, **options)


def apart(**options: Any) -> Strategy:
    return lockstep.LocalSGDStrategy(EVERY, 1, **options)


# Each with the steps that are made first, and those that are measured then. (0, 0) is not measured:
# it differs from others only at first.
CONTENDERS: dict[str, tuple[Any, dict[str, Any], tuple[int, int]]] = {
    "sums": (together, {}, (1, 2)),
    "activations": (together, {"network_gbit_per_second": 0.1}, (2, 6)),
    "bf16": (together, {"compression": "bf16"}, (1, 3)),
    "int8": (together, {"compression": "int8"}, (1, 4)),
    "TopK(0.01)": (together, {"compression": lockstep.TopK(0.01)}, (2, 6)),
    "PowerSGD(4)": (together, {"compression": lockstep.PowerSGD(4)}, (2, 8)),
    "PowerSGD(16)": (together, {"compression": lockstep.PowerSGD(16)}, (2, 8)),
    "PowerSGD(16), an epoch later": (
        together,
        {"compression": lockstep.PowerSGD(16, warm_up=36)},
        (0, 0),
    ),
    "local SGD": (apart, {}, (EVERY, EVERY)),
    "local SGD, int8": (apart, {"compression": "int8"}, (EVERY, EVERY)),
}
BASE = "sums"
LEAST = {"PowerSGD(4)": 4.0, "PowerSGD(16)": 4.0, "local SGD": 5.0}
MOST_POINTS = 0.5


OPTIMIZERS: dict[str, Any] = {
    "adam": FUSED_ADAM,
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def strategy_of(name: str) -> Strategy:
    make, options, _ = CONTENDERS[name]
    strategy: Strategy = make(**options)
    return strategy


# --- on a host ------------------------------------------------------------------------------------


class Clock(lockstep.Callback):
    """When steps have ended. Between epochs hosts bring each other the optimizer's state."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())


def trainer_of(
    name: str, optimizer: str, callbacks: list[lockstep.Callback], seed: int = 0
) -> lockstep.Trainer:
    return lockstep.Trainer(
        NET.make_model(),
        loss=NET.loss,
        optimizer=OPTIMIZERS[optimizer],
        strategy=strategy_of(name),
        callbacks=callbacks,
        seed=seed,
    )


def speed(name: str, optimizer: str) -> dict[str, float]:
    """Samples per second."""
    (before, steps), clock = CONTENDERS[name][2], Clock()
    data = NET.make_data((before + steps) * NET.batch_size)
    trainer_of(name, optimizer, [clock]).fit(data, batch_size=NET.batch_size, verbose=0)
    if not clock.times:  # callbacks run on host 0
        return {}
    seconds = clock.times[-1] - clock.times[before - 1]
    return {"samples_per_second": steps * NET.batch_size / seconds}


def accuracy(name: str, optimizer: str, epochs: int, folder: str, seed: int) -> dict[str, float]:
    """Of digits held out."""
    digits, trainer = load_mnist(folder), trainer_of(name, optimizer, [], seed)
    images, labels = digits.train
    data = torch.from_numpy(images).flatten(1), torch.from_numpy(labels)
    trainer.fit(data, epochs=epochs, batch_size=NET.batch_size, verbose=0)
    images, labels = digits.test
    outputs: torch.Tensor = trainer.predict(torch.from_numpy(images).flatten(1))
    return {"accuracy": (outputs.argmax(1) == torch.from_numpy(labels)).double().mean().item()}


# --- all hosts ------------------------------------------------------------------------------------


def run(hosts: Hosts, words: list[str]) -> dict[str, float] | str:
    """What host 0 has found, or why it has not."""
    cluster = {"worker": [f"{hosts.address(host)}:{PORT}" for host in range(NUM_HOSTS)]}
    command, secret = [sys.executable, str(HERE / "compression.py"), *words], secrets.token_hex(32)
    started = [hosts.run(host, command, task(cluster, host, secret)) for host in range(NUM_HOSTS)]
    try:
        outcomes = [process.finish(TIMEOUT_SECONDS) for process in started]
    except AssertionError as error:
        return str(error)
    finally:
        for process in started:
            process.end()
    for status, _, errors in outcomes:
        if status != 0:
            return last_error(errors) if errors.strip() else f"ended with {status}"
    figures: dict[str, float] = json.loads(outcomes[0][1].splitlines()[-1])
    return figures


def measure(options: argparse.Namespace) -> Results:
    results = Results(options.rounds, options.epochs)
    for number in range(options.rounds):
        names = [one for one in options.contenders if options.digits or any(CONTENDERS[one][2])]
        first = number % len(names)
        for name in names[first:] + names[:first]:
            words = ["--host", name, "--optimizer", options.optimizer]
            with connected_hosts(NUM_HOSTS) as hosts:
                if options.digits is None:
                    for host in range(NUM_HOSTS):
                        hosts.shape(host, options.rate)
                else:
                    words += ["--digits", options.digits, "--epochs", str(options.epochs)]
                    words += ["--seed", str(number)]
                figures = run(hosts, words)
            results.add("wide", name, number, figures)
            results.write(options.output)
            print(f"round {number + 1}/{options.rounds} {name}: {figures}", flush=True)
    return results


def table(results: Results) -> list[str]:
    key = "samples_per_second"
    lines = ["| contender | samples/s | min to max | to sums |", "| --- | ---: | ---: | ---: |"]
    verdicts: list[str] = []
    for name in CONTENDERS:
        speeds = list(results.values("wide", name, key).values())
        if speeds:
            ratio = results.ratio("wide", name, key, base=BASE)
            lines.append(
                f"| {name} | {statistics.median(speeds):,.0f} | {min(speeds):,.0f} to "
                f"{max(speeds):,.0f} | {'-' if ratio is None else f'{ratio:.1f}'} |"
            )
            if ratio is not None and name in LEAST:
                met = "met" if ratio >= LEAST[name] else "NOT met"
                verdicts.append(f"{name}: {ratio:.2f} of {BASE}, {met}: at least {LEAST[name]}")
    return [*lines, "", *verdicts]


def accuracies(results: Results) -> list[str]:
    """Means over the seeds: with 1,000 digits that of a single one is uncertain by half a point."""
    base = results.values("wide", BASE, "accuracy")
    lines = []
    for name in CONTENDERS:
        runs = results.values("wide", name, "accuracy")
        seeds = [seed for seed in runs if seed in base]
        if seeds:
            found = statistics.mean(runs[seed] for seed in seeds)
            points = 100 * (found - statistics.mean(base[seed] for seed in seeds))
            met = "met" if points >= -MOST_POINTS else "NOT met"
            lines.append(
                f"{name}: {found:.2%}, {points:+.2f} points, {met}: -{MOST_POINTS} at most, "
                f"mean of {len(seeds)} seeds"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5, help="of training on digits")
    parser.add_argument("--rate", default="100mbit", help="of each host's link, as tc writes it")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--digits", metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "compression.json")
    parser.add_argument("--host", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.host is not None:
        asked = options.host, options.optimizer
        if options.digits is None:
            print(json.dumps(speed(*asked)))
        else:
            print(json.dumps(accuracy(*asked, options.epochs, options.digits, options.seed)))
        return
    try:
        results = measure(options)
    except NoHostsError as error:
        raise SystemExit(f"bench/compression.py makes hosts of namespaces: {error}") from None
    lines = table(results) if options.digits is None else accuracies(results)
    failures = [f"{name}: {why}" for name, why in results.failures.get("wide", {}).items()]
    print("", *lines, *failures, "", settings(options.rate, 1), sep="\n")


if __name__ == "__main__":
    main()
