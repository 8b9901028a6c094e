"""Models that nobody here wrote: architectures of transformers, as they are, cut in two.

Every architecture is tried in a process of its own: proofs under two replicas and under two stages,
the balance of the cut, and whether torch's ``pipeline()`` splits the same model. A row is kept as
soon as it is known, so a run that was interrupted goes on where it was. Run: ``python
bench/architectures.py --results rows.jsonl --report docs/architectures.md``, with ``--only Llama``
for one.
"""

import argparse
import copy
import json
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from architecture_rows import ARCHITECTURES, Architecture
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_SAMPLES = 24
_BATCH_SIZE = 16
_LENGTH = 16
_STEPS = 3
_BALANCED = 1.5

Row = dict[str, Any]


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
        super().__init__()
        self.has_float32 = False

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
    return seen.has_float32


def proof_of(model: nn.Module, data: Any, strategy: Any) -> Row:
    """How far anything is from what one device computes, and what the proof says of it."""
    import lockstep

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = lockstep.Job(model, loss, optimizer, data, batch_size=_BATCH_SIZE)
    report = lockstep.verify(job, strategy, steps=_STEPS)
    if report.undivided:
        raise RuntimeError(report.undivided)
    largest = max(kind.worst.relative for kind in report.kinds)
    return {"difference": largest, "passed": report.passed, "notes": list(report.notes)}


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


def split_by_torch(model: nn.Module, inputs: dict[str, Tensor]) -> str:
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
    return "yes" if split.num_stages == 2 else f"{split.num_stages} stage"


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


def try_architecture(row: Architecture) -> Row:
    """One row of the table."""
    import lockstep

    model, inputs = make_model(row), make_inputs(row)
    data = (inputs, make_target(model, inputs))
    mirrored = lockstep.MirroredStrategy(devices=2)
    pipeline = lockstep.PipelineStrategy(2)
    return {
        "model": row.model,
        "mirrored": attempt(lambda: proof_of(model, data, mirrored)),
        "pipeline": attempt(lambda: proof_of(model, data, pipeline)),
        "float32": attempt(lambda: computes_in_float32(model, inputs)),
        "cut": attempt(lambda: cut_of(model, data)),
        "torch": attempt(lambda: split_by_torch(model, inputs)),
    }


# --- all of them ----------------------------------------------------------------------------------


def run_apart(row: Architecture, timeout: float) -> Row:
    """Try an architecture in a process of its own, which may hang or die."""
    command = [sys.executable, __file__, "--alone", row.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"model": row.model, "error": f"took longer than {timeout:.0f} seconds"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"model": row.model, "error": lines[-1][:160]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def known_rows(path: Path) -> dict[str, Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {row.pop("name"): row for row in map(json.loads, lines)}


def run_all(path: Path, names: Iterable[str], timeout: float) -> None:
    """Try what is not in the file yet, and what is named once more."""
    known = known_rows(path)
    for row in ARCHITECTURES:
        if row.name in names or not (names or row.name in known):
            found = {"name": row.name, **run_apart(row, timeout)}
            print(json.dumps(found), flush=True)
            with path.open("a") as file:
                file.write(json.dumps(found) + "\n")


# --- the page -------------------------------------------------------------------------------------


def proof_cell(proof: Any, row: Row) -> str:
    if isinstance(proof, str):
        return proof
    if proof["passed"]:
        return "exact"
    draws = any("none per sample" in note for note in proof["notes"])
    reason = " [^2]" if draws else " [^1]" if row["float32"] is True else ""
    return f"{proof['difference']:.0e}{reason}"


def table_line(name: str, row: Row) -> str:
    if "error" in row:
        return f"| {name} | {row['model']} | {row['error']} | | | |"
    cut = row["cut"]
    balance = cut if isinstance(cut, str) else f"{cut['balance']:.2f}"
    cells = [proof_cell(row[kind], row) for kind in ("mirrored", "pipeline")]
    texts = [name, f"`{row['model']}`", *cells, balance, row["torch"]]
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Of the rows that are as they should be."""
    tried = [row for row in rows if "error" not in row]
    cuts = [row["cut"] for row in tried]
    return {
        "mirrored": sum(proof_cell(row["mirrored"], row) == "exact" for row in tried),
        "pipeline": sum(proof_cell(row["pipeline"], row) == "exact" for row in tried),
        "balanced": sum(isinstance(cut, dict) and cut["balance"] <= _BALANCED for cut in cuts),
        "torch": sum(row["torch"] == "yes" for row in tried),
    }


_PAGE = """# Architectures

{num_rows} architectures of transformers {transformers}, of every kind it has: each class as it is
written, with random weights and a tiny configuration, trained for {steps} steps in float64 on
{samples} samples with padding. No option was set, and nothing was patched.

- **{mirrored}** of them are exact on two replicas: loss, gradients and weights are those of a plain
  loop on one device, to within 1e-12.
- **{pipeline}** are exact in two stages.
- **{balanced}** are cut evenly: the slower stage takes at most {limit} times the mean of both.
- **{torch}** are split by `torch.distributed.pipelining.pipeline()`, asked for a cut in the middle
  of their longest list of layers.

| architecture | class | two replicas | two stages | balance | torch's `pipeline()` |
|---|---|---|---|---|---|
{table}

[^1]: It computes in float32 inside, whatever its precision: results differ by the rounding of
    float32 as soon as a batch is computed in parts.
[^2]: It leaves out layers at random (LayerDrop), by one draw for all samples of a batch: in parts,
    each part has a draw of its own.

What cannot be followed is one layer, which is never cut, and the plan says why:

{pieces}

Made by `python bench/architectures.py` with lockstep {lockstep}, torch {pytorch} and Python
{python}, every architecture in a process of its own: `lockstep.verify` with
`MirroredStrategy(devices=2)` and with `PipelineStrategy(2)`, then the plan of two stages, whose
layers are timed on this machine, then torch's `pipeline()` on two samples. *Balance* is the slower
stage's time over the mean of both; 1 is perfect.
"""


def write_page(rows: dict[str, Row], path: Path) -> None:
    pieces = [
        f"- {name}: {piece}"
        for name, row in rows.items()
        if isinstance(row.get("cut"), dict)
        for piece in row["cut"]["pieces"]
    ]
    path.write_text(
        _PAGE.format(
            num_rows=len(rows),
            table="\n".join(table_line(name, row) for name, row in rows.items()),
            pieces="\n".join(pieces) or "- nothing here",
            steps=_STEPS,
            samples=_SAMPLES,
            limit=_BALANCED,
            transformers=version("transformers"),
            lockstep=version("lockstep-train"),
            pytorch=version("torch"),
            python=platform.python_version(),
            **counts(rows.values()),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("architectures.jsonl"))
    parser.add_argument("--report", type=Path, help="the page to write")
    parser.add_argument("--only", nargs="*", default=(), help="names, to be tried once more")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        (row,) = (one for one in ARCHITECTURES if one.name == options.alone)
        print("\n" + json.dumps(try_architecture(row)))
        return
    run_all(options.results, options.only, options.timeout)
    known = known_rows(options.results)
    if options.report:
        ordered = {row.name: known[row.name] for row in ARCHITECTURES if row.name in known}
        write_page(ordered, options.report)


if __name__ == "__main__":
    main()
