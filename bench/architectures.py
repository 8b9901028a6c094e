"""Models that nobody here wrote: architectures of transformers, as they are, cut in two.

Every architecture is tried in a process of its own: proofs under two replicas and under two stages,
the balance of the cut, and whether torch's ``pipeline()`` splits the same model. A row is kept as
soon as it is known, so that a run that was interrupted goes on. Run:
``python bench/architectures.py --results rows.jsonl --report docs/architectures.md``.
"""

import argparse
import json
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from architecture_rows import ARCHITECTURES, Architecture
from torch import Tensor, nn

_SAMPLES = 24
_BATCH_SIZE = 16
_LENGTH = 16
_BALANCED = 1.5


# --- a job ----------------------------------------------------------------------------------------


def tokens() -> Tensor:
    return torch.randint(3, 99, (_SAMPLES, _LENGTH))


def padding() -> Tensor:
    """Of samples of 9 to 16 tokens, but for the first, which is whole."""
    lengths = torch.randint(9, _LENGTH + 1, (_SAMPLES, 1)).index_fill_(0, torch.tensor(0), _LENGTH)
    return (torch.arange(_LENGTH) < lengths).long()


INPUTS: dict[str, Callable[[], Tensor]] = {
    "input_ids": tokens,
    "attention_mask": padding,
    "decoder_input_ids": lambda: tokens()[:, :9],
    "pixel_values": lambda: torch.randn(_SAMPLES, 3, 32, 32),
    "pixel_values_list": lambda: torch.randn(_SAMPLES, 1, 3, 32, 32),
    "input_values": lambda: torch.randn(_SAMPLES, 400),
    "input_features": lambda: torch.randn(_SAMPLES, 16, 64),
    "input_spectrograms": lambda: torch.randn(_SAMPLES, 32, 16),
    "past_values": lambda: torch.randn(_SAMPLES, 32, 3),
    "states": lambda: torch.randn(_SAMPLES, 8, 5),
    "actions": lambda: torch.randn(_SAMPLES, 8, 3),
    "rewards": lambda: torch.randn(_SAMPLES, 8, 1),
    "returns_to_go": lambda: torch.randn(_SAMPLES, 8, 1),
    "timesteps": lambda: torch.arange(8).repeat(_SAMPLES, 1),
}

# What is not named here is called by the name of the input itself.
_ARGUMENTS = {"pixel_values_list": "pixel_values", "input_spectrograms": "input_values"}


def make_model(row: Architecture) -> nn.Module:
    """As the class makes it, in training mode."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, row.model)
    model: nn.Module = kind(kind.config_class(**row.config))
    return model.train()


def make_inputs(row: Architecture) -> dict[str, Tensor]:
    """Its inputs by the names of its arguments."""
    torch.manual_seed(1)
    return {_ARGUMENTS.get(name, name): INPUTS[name]() for name in row.inputs}


def scores_of(output: Any) -> Tensor:
    """What the loss looks at."""
    for name in ("logits", "prediction_logits", "action_preds"):
        if name in output:
            return output[name]  # type: ignore[no-any-return]
    raise LookupError(f"none of the outputs {list(output)} is known")


def loss(output: Any, target: Tensor) -> Tensor:
    """Of each sample: cross-entropy of the last dim."""
    scores = scores_of(output).movedim(-1, 1)
    return F.cross_entropy(scores, target, reduction="none").flatten(1).mean(1)


def make_target(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Classes at random, of the shape of the scores without the last dim."""
    with torch.no_grad():
        scores = scores_of(model(**{name: value[:2] for name, value in inputs.items()}))
    shape = (_SAMPLES, *scores.shape[1:-1])
    return torch.randint(0, scores.shape[-1], shape if len(shape) > 1 else (_SAMPLES,))


# --- what is tried --------------------------------------------------------------------------------


def verified(model: nn.Module, data: Any, strategy: Any) -> tuple[str, Any]:
    """The outcome of a proof in a few words, and its report."""
    import lockstep

    job = lockstep.Job(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        data=data,
        batch_size=_BATCH_SIZE,
    )
    report = lockstep.verify(job, strategy, steps=3)
    if not report.passed:
        return f"differs: {report.first_difference or 'undivided'}", report
    return "exact", report


def stage_costs(plan: Any) -> list[float]:
    """Seconds of each stage, forward and backward."""
    return [stage.forward_seconds + stage.backward_seconds for stage in plan.pipeline.stages]


def split_by_torch(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    """Whether torch's ``pipeline()`` cuts it before the middle one of its longest list of layers."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    longest = max(lists, key=lambda name: len(lists[name]))
    middle = f"{longest}.{len(lists[longest]) // 2}"
    few = {name: value[:2] for name, value in inputs.items()}
    split = pipeline(
        model.eval(), mb_args=(), mb_kwargs=few, split_spec={middle: SplitPoint.BEGINNING}
    )
    return "splits" if split.num_stages == 2 else f"{split.num_stages} stages"


def first_line(error: BaseException) -> str:
    """Of what an error says, with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def outcome(body: Callable[[], str]) -> str:
    try:
        return body()
    except Exception as error:  # a row for every failure, whatever it is
        return first_line(error)


def try_architecture(row: Architecture) -> dict[str, Any]:
    """One row of the table."""
    import lockstep

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Any] = {"name": row.name, "model": row.model}
    model, inputs = make_model(row), make_inputs(row)
    data = (inputs, make_target(model, inputs))
    strategy: Any = lockstep.MirroredStrategy(devices=2)
    found["mirrored"] = outcome(lambda: verified(model, data, strategy)[0])

    def staged() -> str:
        text, report = verified(model, data, lockstep.PipelineStrategy(2))
        found["notes"] = [str(note) for note in report.notes]
        return text

    found["pipeline"] = outcome(staged)
    found["torch"] = outcome(lambda: split_by_torch(model, inputs))
    return found
