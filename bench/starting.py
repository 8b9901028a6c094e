"""How long ``fit`` takes to its first step and to its second, and what it does until then.

Each case is a process of its own. Its clock starts when the model is there and runs through
``Trainer(...)`` (or Keras's ``compile``) and ``fit``; imports come before. Clocks are put around
parts of Lockstep on rank 0; parts are within one another where the table has them indented.
``--against`` runs another checkout of Lockstep, too, in turn with this one.

Run: ``python bench/starting.py [--rounds 3] [--only mlp gpt2-pipeline] [--against ../base]``
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

STEPS = 3

# Of rank 0, in the order in which they come. What a version has not is left out.
PARTS: list[tuple[str, str, str]] = [
    ("tracing", "lockstep.train.runtime.planning", "trace_modes"),
    ("sizes of values", "lockstep.train.runtime.planning", "value_bytes"),
    ("measuring, inseparable layers", "lockstep.train.runtime.planning", "capture_graph"),
    ("  measuring layers", "lockstep.capture.graph", "measure_layers"),
    ("describing the model", "lockstep.train.runtime.planning", "Planning._digest"),
    ("cutting the trace", "lockstep.train.runtime.planning", "partition"),
    ("parameters to shared memory", "lockstep.train.runtime.session", "Session._adopt"),
    ("slots to shared memory", "lockstep.train.runtime.session", "Session._adopt_slots"),
    ("packing", "lockstep.train.runtime.session", "_pack"),
    ("asking for helpers", "lockstep.train.runtime.session", "Session._take_team"),
    ("calling helpers", "lockstep.train.runtime.session", "Session._call"),
    ("  waiting for them to be there", "lockstep.launch.workers.team", "Team.wait_until_ready"),
    ("making the worker", "lockstep.train.runtime.session", "make_worker"),
]

Seconds = dict[str, float]


# --- what is started, in a process of its own -----------------------------------------------------


def mlp(strategy: str, *, has_metrics: bool = False) -> Callable[[], object]:
    from nets import NETS

    metrics = {}
    if has_metrics:
        import torchmetrics

        metrics["accuracy"] = torchmetrics.Accuracy(task="multiclass", num_classes=10)
    net = NETS["mlp"]
    data = net.make_data(STEPS * net.batch_size)
    return _fit(strategy, net.make_model(), net.loss, data, net.batch_size, metrics)


def gpt2(strategy: str) -> Callable[[], object]:
    import nets

    data = nets.sequences(STEPS * 8, num_words=50_257)
    return _fit(strategy, nets.gpt2(), nets.token_loss, data, 8, {})


def _fit(
    strategy: str, model: Any, loss: Any, data: Any, batch_size: int, metrics: Mapping[str, Any]
) -> Callable[[], object]:
    import torch

    make_optimizer = partial(torch.optim.Adam, lr=1e-4, fused=True)
    if strategy == "loop":
        return partial(_plain_loop, model, loss, make_optimizer, data, batch_size)

    def start() -> object:
        import lockstep

        strategies: Any = {
            "alone": lockstep.SingleDeviceStrategy,
            "mirrored": partial(lockstep.MirroredStrategy, 2),
            "pipeline": partial(lockstep.PipelineStrategy, 2),
        }
        made = strategies[strategy]()
        trainer = lockstep.Trainer(
            model, loss=loss, optimizer=make_optimizer, strategy=made, metrics=metrics
        )
        return trainer.fit(data, batch_size=batch_size, shuffle=False, verbose=0)

    return start


def _plain_loop(model: Any, loss: Any, make_optimizer: Any, data: Any, size: int) -> None:
    """What no library can start faster than."""
    optimizer = make_optimizer(model.parameters())

    def step(number: int) -> None:
        inputs, targets = (part[number * size : (number + 1) * size] for part in data)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    step = timed(step, STEP_TIMES)
    for number in range(STEPS):
        step(number)


def keras_mlp() -> Callable[[], object]:
    import lockstep

    strategy = lockstep.MirroredStrategy(2)
    with strategy.scope():
        import keras

        model = keras.Sequential(
            [keras.Input((784,))]
            + [keras.layers.Dense(256, activation="relu") for _ in range(2)]
            + [keras.layers.Dense(10)]
        )
    from nets import NETS

    data = NETS["mlp"].make_data(STEPS * 512)

    def start() -> object:
        with strategy.scope():
            model.compile(
                optimizer="adam",
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        return model.fit(*(part.numpy() for part in data), batch_size=512, verbose=0)

    return start


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    "mlp-loop": partial(mlp, "loop"),
    "mlp": partial(mlp, "mirrored"),
    "mlp-metrics": partial(mlp, "mirrored", has_metrics=True),
    "mlp-metrics-again": partial(mlp, "mirrored", has_metrics=True),
    "keras-mlp": keras_mlp,
    "gpt2-loop": partial(gpt2, "loop"),
    "gpt2-alone": partial(gpt2, "alone"),
    "gpt2-mirrored": partial(gpt2, "mirrored"),
    "gpt2-pipeline": partial(gpt2, "pipeline"),
}

STEP_TIMES: list[tuple[float, float]] = []


def timed(function: Callable[..., Any], times: list[tuple[float, float]]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            times.append((began, time.perf_counter()))

    return call


def run_case(name: str) -> Seconds:
    """Seconds of one start, by part. Puts clocks into modules."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    start = CASES[name]()
    clocks: dict[str, list[tuple[float, float]]] = {}
    if not name.endswith("loop"):
        _put_clocks(clocks)
    if name.endswith("again"):  # another Trainer of a process that has had one
        start()
        STEP_TIMES.clear()
        for times in clocks.values():
            times.clear()
    began = time.perf_counter()
    start()
    (first_began, first_ended), second = STEP_TIMES[:2]
    return {
        **{label: sum(end - start for start, end in times) for label, times in clocks.items()},
        "to the first step": first_began - began,
        "the first step": first_ended - first_began,
        "the second step": second[1] - second[0],
        "from Trainer to the first step's end": first_ended - began,
    }


def _put_clocks(clocks: dict[str, list[tuple[float, float]]]) -> None:
    import lockstep.parallel.build  # noqa: F401  # with it come all kinds of workers
    from lockstep.parallel.worker import Worker

    kinds: list[Any] = [Worker, *Worker.__subclasses__()]
    for kind in kinds:
        if "train_step" in vars(kind):
            setattr(kind, "train_step", timed(kind.train_step, STEP_TIMES))  # noqa: B010
    for label, module, path in PARTS:
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        if hasattr(owner, name):
            setattr(owner, name, timed(getattr(owner, name), clocks.setdefault(label, [])))


# --- the driver -----------------------------------------------------------------------------------


def measure(case: str, checkout: Path) -> Seconds:
    command = [sys.executable, __file__, "--case", case]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    found: Seconds = json.loads(done.stdout.splitlines()[-1])
    return found


def report(case: str, runs: Mapping[str, list[Seconds]]) -> None:
    """A table of medians, and of each figure's least and most."""
    print(f"\n{case}, seconds" + "".join(f"  {name:>24}" for name in runs))
    labels = dict.fromkeys(label for found in runs.values() for one in found for label in one)
    for label in labels:
        columns = []
        for found in runs.values():
            times = [one[label] for one in found if label in one]
            text = (
                f"{statistics.median(times):8.3f} ({min(times):.2f} to {max(times):.2f})"
                if times
                else "-"
            )
            columns.append(f"  {text:>24}")
        print(f"{label:38}" + "".join(columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--against", type=Path)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(run_case(options.case)))
        return
    checkouts = {"this": Path(__file__).parents[1]}
    if options.against is not None:
        checkouts = {"before": options.against.resolve(), **checkouts}
    for case in options.only:
        runs: dict[str, list[Seconds]] = {name: [] for name in checkouts}
        for number in range(options.rounds):
            names = list(checkouts) if number % 2 == 0 else list(reversed(checkouts))
            for name in names:
                if not (case.endswith("loop") and name == "before"):
                    runs[name].append(measure(case, checkouts[name]))
        report(case, {name: found for name, found in runs.items() if found})


if __name__ == "__main__":
    main()
