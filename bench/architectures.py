"""Models that nobody here wrote: architectures of transformers, as they are, cut in two.

Of each: proofs under two replicas, under two stages and with layers divided inside, the balance of
the cut, the part of the parameters that is divided, and whether torch's ``pipeline()`` splits the
same model. A process tries one after the other; one that makes it hang or
die has a row that says so, and the next process goes on behind it. What is found is kept at once,
so a run that was interrupted goes on where it was. Run: ``python bench/architectures.py --results
rows.jsonl --report docs/architectures.md``, with ``--only Llama`` for one.
"""

import argparse
import copy
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from architecture_rows import ARCHITECTURES, Architecture
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_SAMPLES = 24
_BATCH_SIZE = 16
_LENGTH = 16
_STEPS = 3
_BALANCED = 1.5
_CLIP_NORM = 0.1
_EXACT = 1e-12
_MOSTLY = 0.8
_ROUNDING = 1e-5  # relative, of what is computed in float32
_MARK = "found: "

Row = dict[str, Any]

_MADE_WITH = {"transformers": version("transformers")}


# --- a job ----------------------------------------------------------------------------------------


def tokens() -> Tensor:
    return torch.randint(3, 99, (_SAMPLES, _LENGTH))


def padding() -> Tensor:
    """A mask for sentences of 9 to 16 tokens."""
    return (torch.arange(_LENGTH) < torch.randint(9, _LENGTH + 1, (_SAMPLES, 1))).long()


# By name: the argument of the model, and what it is given.
INPUTS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "tokens": ("input_ids", tokens),
    "padding": ("attention_mask", padding),
    "translation": ("decoder_input_ids", lambda: tokens()[:, :9]),
    "image": ("pixel_values", lambda: torch.randn(_SAMPLES, 3, 32, 32)),
    "images": ("pixel_values", lambda: torch.randn(_SAMPLES, 1, 3, 32, 32)),
    "sound": ("input_values", lambda: torch.randn(_SAMPLES, 400)),
    "spectrogram": ("input_values", lambda: torch.randn(_SAMPLES, 32, 16)),
    "mel features": ("input_features", lambda: torch.randn(_SAMPLES, 16, 64)),
    "series": ("past_values", lambda: torch.randn(_SAMPLES, 32, 3)),
    "states": ("states", lambda: torch.randn(_SAMPLES, 8, 5)),
    "actions": ("actions", lambda: torch.randn(_SAMPLES, 8, 3)),
    "rewards": ("rewards", lambda: torch.randn(_SAMPLES, 8, 1)),
    "returns": ("returns_to_go", lambda: torch.randn(_SAMPLES, 8, 1)),
    "times": ("timesteps", lambda: torch.arange(8).repeat(_SAMPLES, 1)),
}


def make_model(row: Architecture) -> nn.Module:
    """As the class makes it, in training mode."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, row.model)
    model: nn.Module = kind(kind.config_class(**row.config))
    return model.train()


def make_inputs(row: Architecture) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {argument: make() for argument, make in (INPUTS[name] for name in row.inputs)}


def few_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:2] for name, value in inputs.items()}


def scores_of(output: Any) -> Tensor:
    """What the loss looks at."""
    for name in ("logits", "prediction_logits", "action_preds"):
        if name in output:
            return output[name]  # type: ignore[no-any-return]
    raise LookupError(f"none of the outputs {list(output)} is known")


def loss(output: Any, target: Tensor) -> Tensor:
    """Of each sample: cross-entropy of the last dim."""
    scores = scores_of(output).movedim(-1, 1)
    return F.cross_entropy(scores, target, reduction="none").view(len(target), -1).mean(1)


def make_target(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Classes at random, of the shape of the scores without the last dim."""
    with torch.no_grad():
        scores = scores_of(model(**few_of(inputs)))
    return torch.randint(0, scores.shape[-1], (_SAMPLES, *scores.shape[1:-1]))


# --- what is tried --------------------------------------------------------------------------------


class Precisions(TorchDispatchMode):
    """Sees whether anything is computed in float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_float32: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.has_float32 |= isinstance(result, Tensor) and result.dtype == torch.float32
        return result


def computes_in_float32(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether a model does so even in float64."""
    few = few_of(inputs)
    doubled = {name: one.double() if one.is_floating_point() else one for name, one in few.items()}
    with Precisions() as seen:
        copy.deepcopy(model).double()(**doubled)
    return bool(seen.has_float32)


def proof_of(model: nn.Module, data: Any, strategy: Any) -> Row:
    """How far anything is from what one device computes, and what the proof says of it."""
    import lockstep

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = lockstep.Job(model, loss, optimizer, data, batch_size=_BATCH_SIZE)
    report = lockstep.verify(job, strategy, steps=_STEPS)
    if report.undivided:
        raise RuntimeError(report.undivided)
    largest = max(kind.worst.relative for kind in report.kinds)
    return {
        "difference": largest,
        "passed": report.passed,
        "draws": any("none per sample" in note for note in report.notes),
        "float32": computes_in_float32(model, data[0]),
        "normed": any(isinstance(one, _BatchNorm) for one in model.modules()),
    }


def cut_of(model: nn.Module, data: Any) -> Row:
    """The balance of two stages by what was measured, and what the plan has to say."""
    import lockstep

    plan = lockstep.PipelineStrategy(2).plan(model, batch_size=_BATCH_SIZE, sample=data)
    assert plan.pipeline is not None
    costs = [
        stage.predicted.forward_seconds + stage.predicted.backward_seconds
        for stage in plan.pipeline.stages
        if stage.predicted is not None
    ]
    pieces = [note for note in plan.notes if "one piece" in note]
    return {"balance": max(costs) * len(costs) / sum(costs), "pieces": pieces}


def split_by_torch(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """What torch's ``pipeline()`` makes of it, cut in the middle of its longest list of layers."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    }
    if not lists:
        raise LookupError("it has no list of layers")
    longest = max(lists, key=lists.__getitem__)
    middle = {f"{longest}.{lists[longest] // 2}": SplitPoint.BEGINNING}
    split = pipeline(model, mb_args=(), mb_kwargs=few_of(inputs), split_spec=middle)
    return int(split.num_stages)


def first_line(error: BaseException) -> str:
    """Of what an error says, with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def attempt(body: Callable[[], Any]) -> Any:
    """What comes of it, or the first line of why nothing does."""
    try:
        return body()
    except Exception as error:  # there is a row for every failure, whatever it is
        return first_line(error)


def job_of(row: Architecture) -> tuple[nn.Module, Any]:
    """The model and its data."""
    model, inputs = make_model(row), make_inputs(row)
    return model, (inputs, make_target(model, inputs))


def mirrored(row: Architecture) -> Row:
    import lockstep

    return proof_of(*job_of(row), lockstep.MirroredStrategy(devices=2))


def pipeline(row: Architecture) -> Row:
    import lockstep

    return proof_of(*job_of(row), lockstep.PipelineStrategy(2))


def cut(row: Architecture) -> Row:
    return cut_of(*job_of(row))


def torchs(row: Architecture) -> Row:
    return {"stages": split_by_torch(make_model(row), make_inputs(row))}


def divided(row: Architecture) -> Row:
    import lockstep

    model, data = job_of(row)
    config: Any = model.config
    if getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"  # other kernels take no float64
    with torch.random.fork_rng():
        plan = lockstep.TensorParallelStrategy(2).plan(model, batch_size=_BATCH_SIZE, sample=data)
    assert plan.tensor is not None
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    reasons: Counter[str] = Counter()
    for name, reason in plan.tensor.whole:
        reasons[reason] += sizes[name]
    return {
        "divided": sum(sizes[one.name] for one in plan.tensor.parameters) / sum(sizes.values()),
        "reason": reasons.most_common(1)[0][0] if reasons else "",
        "difference": difference_when_divided(model, data),
    }


class InDouble(TorchFunctionMode):
    """Functions that are asked for float32 give float64, so that rounding hides no error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if one is torch.float32 else one for one in args]
        options = {
            name: torch.float64 if one is torch.float32 else one
            for name, one in (kwargs or {}).items()
        }
        return func(*args, **options)


class ComputedInDouble(nn.Module):
    """A model whose own choices of float32 are float64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        with InDouble():
            return self.model(**inputs)


def difference_when_divided(model: nn.Module, data: Any) -> float:
    """The weights' relative difference from a plain loop, after steps of Adam with clipping."""
    import lockstep
    from lockstep.data.map_style.sources import as_source
    from lockstep.proof.reference import Reference

    inputs, targets = data
    inputs = {
        name: one.double() if one.is_floating_point() else one for name, one in inputs.items()
    }
    model = ComputedInDouble(model.double())
    make = partial(torch.optim.Adam, lr=1e-2, eps=1e-3)
    plain = copy.deepcopy(model)
    trainer = lockstep.Trainer(
        model,
        loss=loss,
        optimizer=make,
        clip_norm=_CLIP_NORM,
        precision="fp64",
        strategy=lockstep.TensorParallelStrategy(2),
        seed=5,
    )
    size = _SAMPLES // _STEPS
    trainer.fit((inputs, targets), batch_size=size, shuffle=False, verbose=0)
    trainer.close()
    source = as_source((inputs, targets))
    batches = [(source, torch.arange(start, start + size)) for start in range(0, _SAMPLES, size)]
    reference = Reference(plain, loss, make(plain.parameters()), batches, seed=5)
    for _ in batches:
        reference.step(1, before_update=lambda own: clip(list(own.values())))
    expected = dict(plain.named_parameters())
    scale = math.hypot(*(one.norm().item() for one in expected.values()))
    differences = [(one - expected[name]).norm() for name, one in model.named_parameters()]
    return float(max(differences)) / scale


def clip(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, _CLIP_NORM)


TRIALS: dict[str, Callable[[Architecture], Row]] = {
    "divided": divided,
    "cut": cut,
    "torch": torchs,
    "pipeline": pipeline,
    "mirrored": mirrored,
}


# --- all of them ----------------------------------------------------------------------------------


def work(trial: str, names: Sequence[str]) -> None:
    """In a process of its own: a line for every architecture."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = {row.name: row for row in ARCHITECTURES}
    for name in names:
        found = attempt(partial(TRIALS[trial], rows[name]))
        reply(found if isinstance(found, dict) else {"error": found})


def reply(found: Row) -> None:
    """Torch and transformers print on the same stream: a line of our own begins with a mark."""
    print(f"\n{_MARK}{json.dumps(found)}", flush=True)


def run_trial(trial: str, names: Sequence[str], timeout: float) -> Iterator[tuple[str, Row]]:
    """What comes of each, with a new worker after one that hangs or dies."""
    left = list(names)
    while left:
        command = [sys.executable, __file__, "--work", trial, "--only", *left]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
            for found in replies(worker, timeout):
                yield left.pop(0), found
                if "error" in found or not left:
                    break
            worker.kill()


def replies(worker: subprocess.Popen[bytes], timeout: float) -> Iterator[Row]:
    """A worker's lines; an error where the next one does not come."""
    assert worker.stdout is not None
    pending, output = b"", worker.stdout.fileno()
    deadline = time.monotonic() + timeout
    while True:
        if not wait([output], max(deadline - time.monotonic(), 0)):
            yield {"error": f"took longer than {timeout:.0f} seconds"}
            return
        received = os.read(output, 1 << 16)
        if not received:
            yield {"error": f"the process ended with status {worker.wait()}"}
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            if line.startswith(_MARK.encode()):
                deadline = time.monotonic() + timeout
                yield json.loads(line[len(_MARK) :])


def known_rows(path: Path) -> dict[str, Row]:
    """By architecture: what each trial has found."""
    known: dict[str, Row] = defaultdict(dict)
    for line in path.read_text().splitlines() if path.exists() else ():
        found = json.loads(line)
        known[found["name"]][found["trial"]] = found
    return known


def run_all(path: Path, only: Sequence[str], timeout: float) -> None:
    """Try what is not in the file yet, and what is named once more."""
    for trial in TRIALS:
        known = known_rows(path)
        missing = [row.name for row in ARCHITECTURES if trial not in known[row.name]]
        for name, found in run_trial(trial, only or missing, timeout):
            line = json.dumps({"name": name, "trial": trial, **_MADE_WITH, **found})
            print(line, flush=True)
            with path.open("a") as file:
                file.write(f"{line}\n")


# --- the page -------------------------------------------------------------------------------------


def proof_cell(proof: Row) -> str:
    if proof["passed"]:
        return "exact"
    if proof["trial"] == "pipeline" and proof["normed"]:
        return "other statistics [^3]"
    is_rounding = proof["float32"] and proof["difference"] < _ROUNDING
    reason = " [^1]" if is_rounding else " [^2]" if proof["draws"] else ""
    return f"{proof['difference']:.0e}{reason}"


def division_cell(found: Row) -> str:
    part = f"{found['divided']:.0%}"
    if found["divided"] < _MOSTLY:
        part += f" (most of the rest: {found['reason']})"
    return part if found["difference"] < _EXACT else f"{part}, {found['difference']:.0e}"


# What a trial has found, in a few words.
_CELLS: dict[str, Callable[[Row], str]] = {
    "mirrored": proof_cell,
    "pipeline": proof_cell,
    "cut": lambda found: f"{found['balance']:.2f}",
    "divided": division_cell,
    "torch": lambda found: "yes" if found["stages"] == 2 else f"{found['stages']} stage",
}


# Of what an error says, the part by which it is known, and what stands for it in the table.
_REASONS = {
    "cannot capture your model as a full graph": "not captured [^4]",
    "compute in the precision of their inputs": "no float64 [^5]",
    "Expected mat_a to be Float32": "no float64 [^5]",
    "Expected more than 1 value per channel": "too few samples [^3]",
}


def reason_of(error: str) -> str:
    """Why a trial has failed, in a few words."""
    known = (reason for part, reason in _REASONS.items() if part in error)
    return next(known, error.partition(". ")[0])


def cells_of(found: Row) -> list[str]:
    """Of one architecture; a trial that was not made has none."""
    cells = []
    for trial, describe in _CELLS.items():
        one = found.get(trial)
        text = ""
        if one is not None:
            text = reason_of(one["error"]) if "error" in one else describe(one)
        cells.append(text.replace("|", "/"))
    return cells


def counts(rows: Sequence[list[str]]) -> dict[str, str]:
    """Of the cells that are as they should be, and of all in the column."""
    columns = [[cell for cell in column if cell] for column in zip(*rows, strict=True)]
    is_good = {
        "mirrored": lambda cell: cell == "exact",
        "pipeline": lambda cell: cell == "exact",
        "cut": lambda cell: cell[0].isdigit() and float(cell) <= _BALANCED,
        "divided": lambda cell: cell.endswith("%") and "(" not in cell,
        "torch": lambda cell: cell == "yes",
    }
    return {
        trial: f"{sum(map(is_good[trial], column))} of {len(column)}"
        for trial, column in zip(_CELLS, columns, strict=True)
    }


_PAGE = """# Architectures

{num_rows} architectures of transformers {transformers}, of every kind it has: each class as it is
written, with random weights and a tiny configuration. No option was set, and nothing was patched.

- Cut evenly in two: **{cut}**. The slower stage takes at most {limit} times the mean of both.
- Split by `torch.distributed.pipelining.pipeline()`, asked for a cut in the middle of the longest
  list of layers: **{torch}**.
- Exact in two stages: **{pipeline}** that were tried. Loss, gradients and weights of {steps} steps
  in float64 on {samples} samples with padding are those of a plain loop, to within 1e-12.
- Exact on two replicas: **{mirrored}** that were tried.
- Layers divided inside, with at least {mostly:.0%} of the parameters: **{divided}** that were
  tried. After {steps} steps of Adam on two processes, with `clip_norm` and the class's own
  dropout, the weights are those of a plain loop, to within 1e-12 in float64. Here a model computes
  in float64 what it would compute in float32.

| architecture | class | two replicas | two stages | balance | divided | torch's `pipeline()` |
|---|---|---|---|---|---|---|
{table}

[^1]: It computes in float32 inside, whatever its precision: results differ by the rounding of
    float32 as soon as a batch is computed in parts.
[^2]: It leaves out layers at random (LayerDrop), by one draw for all samples of a batch: in parts,
    each part has a draw of its own.
[^3]: It has BatchNorm layers, which in a pipeline take the statistics of a microbatch
    ([exactness](exactness.md)): exact with `microbatches=1`.
[^4]: "It seems that we cannot capture your model as a full graph."
[^5]: Its experts are computed by a kernel that does not take float64, in which proofs are made.
    With `config._experts_implementation = "eager"` it trains in float64, but for a softmax in
    float32 in its router; that is how it was divided inside.

What cannot be followed is one layer, which is never cut, and the plan says why:

{pieces}

Made by `python bench/architectures.py` (`make bench-architectures`) with lockstep {lockstep}, torch
{pytorch} and Python {python}: the plan of two stages, whose layers are timed on this machine;
torch's `pipeline()` on two samples; `lockstep.verify` with `PipelineStrategy(2)` and with
`MirroredStrategy(devices=2)`; `fit` with `TensorParallelStrategy(2)`. *Balance* is the slower
stage's time over the mean of both; 1 is perfect. *Divided* is the part of the parameters that the
processes divide. An empty cell was not tried.
"""


def write_page(known: dict[str, Row], path: Path) -> None:
    rows = {row: cells_of(known[row.name]) for row in ARCHITECTURES}
    lines = [f"| {row.name} | `{row.model}` | {' | '.join(rows[row])} |" for row in rows]
    pieces = [
        f"- {row.name}: {piece}"
        for row in ARCHITECTURES
        for piece in known[row.name].get("cut", {}).get("pieces", ())
    ]
    versions = {one["transformers"] for found in known.values() for one in found.values()}
    path.write_text(
        _PAGE.format(
            num_rows=len(rows),
            table="\n".join(lines),
            pieces="\n".join(pieces) or "- nothing here",
            steps=_STEPS,
            samples=_SAMPLES,
            limit=_BALANCED,
            mostly=_MOSTLY,
            transformers=" and ".join(sorted(versions)),
            lockstep=version("lockstep-train"),
            pytorch=version("torch"),
            python=platform.python_version(),
            **counts(list(rows.values())),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("architectures.jsonl"))
    parser.add_argument("--report", type=Path, help="the page to write")
    parser.add_argument("--only", nargs="*", default=(), help="names, to be tried once more")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each")
    parser.add_argument("--work", choices=TRIALS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.only)
        return
    run_all(options.results, options.only, options.timeout)
    if options.report:
        write_page(known_rows(options.results), options.report)


if __name__ == "__main__":
    main()
