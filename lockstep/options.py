"""Checks of users' arguments: numbers, counts, choices.

Each check adds its problem to a list, which the caller raises at once.
"""

import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeGuard, TypeVar

from lockstep.errors import OptionError, Problems
from lockstep.formatting import listed

# Endings of files of weights in other formats.
_OTHER_FORMATS = (".pt", ".pth", ".ckpt", ".bin", ".h5", ".keras", ".npz", ".pkl")

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Arguments of other libraries, and their place in Lockstep.
_CHECKPOINT = "fit has it: checkpoint='folder' resumes by itself"
_LOADER = "A DataLoader has it: fit(DataLoader(...)), or batch_size= of fit for arrays and Datasets"
_STRATEGY = "The strategy has it: strategy=lockstep.MirroredStrategy(devices=2)"
_VALIDATION = "fit has it: validation_data=, evaluated after each epoch"
_ELSEWHERE = {
    "accelerator": _STRATEGY,
    "accumulate_grad_batches": "It is accumulate=4",
    "checkpoint_callback": _CHECKPOINT,
    "ckpt_path": _CHECKPOINT,
    "device": _STRATEGY,
    "devices": _STRATEGY,
    "eval_dataset": _VALIDATION,
    "gradient_accumulation_steps": "It is accumulate=4",
    "gradient_clip_val": "It is clip_norm=1.0",
    "initial_epoch": _CHECKPOINT,
    "logger": "Loggers are callbacks: callbacks=[lockstep.callbacks.CSVLogger('log.csv')]",
    "max_epochs": "fit has it: epochs=3",
    "max_grad_norm": "It is clip_norm=1.0",
    "num_workers": _LOADER,
    "resume_from_checkpoint": _CHECKPOINT,
    "train_dataloaders": "Data is the first argument, without a name",
    "val_dataloaders": _VALIDATION,
    "validation_freq": _VALIDATION,
    "callbacks": "The Trainer has them: lockstep.Trainer(..., callbacks=[...])",
    "class_weight": "The loss has it: torch.nn.CrossEntropyLoss(weight=...)",
    "lr": "The optimizer has it: optimizer=functools.partial(torch.optim.Adam, lr=1e-3)",
    "learning_rate": "The optimizer has it: optimizer=functools.partial(torch.optim.Adam, lr=1e-3)",
    "x": "Data is the first argument, without a name",
}


def checks_names(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function answer an unknown argument with the most similar name."""

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not kwargs.keys() <= _options_of(function).keys():
            raise unknown_argument(function, kwargs)
        return function(*args, **kwargs)

    return checked


@lru_cache
def _options_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def unknown_argument(function: Callable[..., Any], given: Collection[str]) -> OptionError:
    """The error for a call with an unknown argument, with the most similar name."""
    known = [name for name in _options_of(function) if name != "self"]
    strange = next(name for name in given if name not in known)
    near = get_close_matches(strange.lower(), known, n=1)
    is_elsewhere = strange in _ELSEWHERE and f"{strange}s" not in known
    fix = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known)}."
    return OptionError(
        f"{function.__qualname__.removesuffix('.__init__')} has no argument of this name.",
        received=f"{strange}=",
        fix=f"{_ELSEWHERE[strange]}." if is_elsewhere else fix,
    )


def is_number(value: object) -> TypeGuard[float]:
    """True for a number that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """True for an integer of at least ``least`` that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(
    name: str,
    value: object,
    problems: Problems,
    *,
    least: int = 1,
    optional: bool = False,
    fix: str = "",
) -> None:
    """Check for an integer of at least ``least``, or None if optional."""
    if not is_count(value, least) and not (optional and value is None):
        problems.add(
            f"`{name}` must be an integer of at least {least}{', or None' * optional}.",
            received=f"{name}={value!r}",
            fix=fix or f"Use {max(least, 1)}.",
        )


def check_number(
    name: str, value: object, problems: Problems, *, above: float | None = None, fix: str = ""
) -> None:
    """Check for a finite number, above a limit if given."""
    received = f"{name}={value!r}"
    if not is_number(value) or not math.isfinite(value):
        problems.add(
            f"`{name}` must be a finite number.", received=received, fix=fix or "Pass one."
        )
    elif above is not None and value <= above:
        what = f"`{name}` must be greater than {above:g}."
        problems.add(what, received=received, fix=fix or "Raise it.")


def check_positive(
    name: str, value: object, problems: Problems, *, fix: str, may_be_infinite: bool = False
) -> None:
    """Check for a number above 0."""
    if not is_number(value) or not value > 0 or not (may_be_infinite or math.isfinite(value)):
        what = f"`{name}` must be a positive number."
        problems.add(what, received=f"{name}={value!r}", fix=fix)


def check_timeout(problems: Problems, seconds: object) -> None:
    """Check for a positive number of seconds."""
    fix = "Leave it out for 600 s."
    check_positive("timeout_seconds", seconds, problems, fix=fix, may_be_infinite=True)


def check_seed(seed: object, problems: Problems) -> None:
    """Check for a seed that torch accepts."""
    if not (is_count(seed, 0) and seed < 1 << 63):
        what = "`seed` must be an integer from 0 to 2**63 - 1."
        problems.add(what, received=f"seed={seed!r}", fix="Use 0.")


def check_choice(
    name: str, value: object, choices: Collection[str], problems: Problems, *, fix: str
) -> None:
    """Check for one of the choices; the fix suggests the most similar one."""
    if value not in choices:
        what = f"`{name}` must be one of {listed(choices)}."
        meant = get_close_matches(str(value).lower(), choices, n=1)
        problems.add(what, received=f"{name}={value!r}", fix=f"Use {meant[0]!r}." if meant else fix)


def check_flag(name: str, value: object, problems: Problems, *, fix: str = "Pass either.") -> None:
    """Check for True or False."""
    if not isinstance(value, bool):
        what = f"`{name}` must be True or False."
        problems.add(what, received=f"{name}={value!r}", fix=fix)


def check_path(name: str, value: object, problems: Problems) -> None:
    """Check for a path, not a URL."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        fix = "Pass a string or a Path."
        problems.add(f"`{name}` must be a path.", received=f"{name}={value!r}", fix=fix)
    elif "://" in os.fsdecode(value):
        what = f"`{name}` must be a path on this machine."
        problems.add(what, received=f"{name}={value!r}", fix="Pass a path, and no URL.")


def check_weights_path(name: str, value: object, problems: Problems) -> None:
    """Check for the path of a file of weights, which is in the format safetensors."""
    check_path(name, value, problems)
    ending = Path(value).suffix if isinstance(value, str | os.PathLike) else ""
    if ending in _OTHER_FORMATS:
        problems.add(
            "Weights are written as safetensors.",
            received=f"a {name} that ends in {ending!r}",
            fix="End it in '.safetensors'. torch.save(trainer.model.state_dict(), path) writes "
            "torch's format.",
        )


def check_name(name: str, value: Any, problems: Problems, *, optional: bool = False) -> None:
    """Check for a string that is not empty, or None if optional."""
    if not (optional and value is None) and not (isinstance(value, str) and value):
        what = f"`{name}` must be a string."
        problems.add(what, received=f"{name}={value!r}", fix="Pass a name.")


def check_mapping(name: str, value: object, problems: Problems) -> None:
    """Check for a dict or None."""
    if not isinstance(value, Mapping | None):
        fix = "Pass {'width': 256}."
        problems.add(f"`{name}` must be a dict.", received=f"{name}={value!r}", fix=fix)


def check_frequency(name: str, value: object, problems: Problems) -> None:
    """Check for "epoch" or a number of steps."""
    if value != "epoch" and not is_count(value):
        what = f"`{name}` must be 'epoch' or a number of steps of at least 1."
        problems.add(what, received=f"{name}={value!r}", fix="Use 'epoch'.")
