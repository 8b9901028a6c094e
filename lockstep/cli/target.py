"""The arguments of several commands: a TARGET, ``file.py:function``, and a strategy by name.

The file is imported as a module, with its directory first in ``sys.path``, and not executed as a
script: so its classes and functions can be sent to helper processes by reference.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import LockstepError, OptionError
from lockstep.plan.pipeline.schedules import SCHEDULES
from lockstep.proof.job import Job
from lockstep.strategies.automatic import AutoStrategy
from lockstep.strategies.base import Strategy
from lockstep.strategies.fully_sharded import FullyShardedStrategy
from lockstep.strategies.hybrid import HybridStrategy
from lockstep.strategies.local_sgd import LocalSGDStrategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.parameter_server import ParameterServerStrategy
from lockstep.strategies.pipeline import PipelineStrategy
from lockstep.strategies.single import SingleDeviceStrategy
from lockstep.strategies.tensor_parallel import TensorParallelStrategy
from lockstep.strategies.tpu import TPUStrategy


def add_strategy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add TARGET and the options of strategies; see ``load_job`` and ``make_strategy``."""
    parser.add_argument(
        "target", metavar="TARGET", help="file.py:function, the function returning a lockstep.Job"
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="mirrored",
        metavar="NAME",
        help=f"{', '.join(STRATEGIES)} (default: mirrored)",
    )
    add_strategy_options(parser)


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of strategies, but for the strategy's name."""
    parser.add_argument(
        "--devices", type=int, metavar="N", help="number of devices; of a hybrid, per replica"
    )
    parser.add_argument(
        "--shares",
        type=int,
        metavar="S",
        help="parts of each batch, or of each layer (default: one per device)",
    )
    parser.add_argument(
        "--every", metavar="H", help="of local: steps between two averages, or epoch (default: 16)"
    )
    parser.add_argument(
        "--servers", type=int, metavar="S", help="of servers: how many (default: 1)"
    )
    stages = parser.add_argument_group("pipeline, hybrid, and local whose replicas are pipelines")
    stages.add_argument(
        "--stages", type=int, metavar="S", help="of local: devices of each replica (default: 1)"
    )
    stages.add_argument(
        "--cuts", metavar="NAMES", help="modules at which stages begin, separated by commas"
    )
    stages.add_argument("--microbatches", type=int, metavar="M", help="of each batch and replica")
    stages.add_argument("--schedule", choices=SCHEDULES, help="order of the passes (default: 1f1b)")
    stages.add_argument(
        "--tensor", type=int, metavar="N", help="of hybrid: processes that divide layers inside"
    )
    stages.add_argument(
        "--data", metavar="R", help="replicas of a hybrid, or of each stage: 2, or 3,1; of tensor"
    )


# --- strategies ---------------------------------------------------------------------------------


def make_strategy(options: argparse.Namespace) -> Strategy:
    """The strategy that the options describe.

    Raises:
        OptionError: the strategy has no such option.
        DeviceError: the devices do not exist.
    """
    _check_options(options)
    return _STRATEGIES[options.strategy](options)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options of other strategies."""
    taken = {
        "auto": (),
        "pipeline": _PIPELINE_OPTIONS,
        "hybrid": (*_PIPELINE_OPTIONS, "data", "tensor"),
        "local": ("every", "stages", *_PIPELINE_OPTIONS),
        "servers": ("servers",),
        "tensor": ("shares", "data"),
    }
    others = {"shares", *_PIPELINE_OPTIONS, "data", "tensor", "every", "servers", "stages"}
    others -= set(taken.get(options.strategy, ("shares",)))
    unknown = sorted(name for name in others if getattr(options, name) is not None)
    if unknown:
        raise OptionError(
            f"The strategy {options.strategy} has no such option.",
            received=", ".join(f"--{name} {getattr(options, name)}" for name in unknown),
            fix="Leave it out, or use another strategy.",
        )


def _single(options: argparse.Namespace) -> Strategy:
    if options.devices not in (None, 1) or options.shares not in (None, 1):
        raise OptionError(
            "The strategy single has one device and one share.",
            received=f"--devices {options.devices} --shares {options.shares}",
            fix="Use --strategy mirrored, or leave these out.",
        )
    return SingleDeviceStrategy()


def _local(options: argparse.Namespace) -> Strategy:
    every: Any = options.every or "16"  # the strategy raises for other values
    return LocalSGDStrategy(
        int(every) if every.isdecimal() else every,
        options.devices,
        stages=options.stages,
        cuts=_names(options.cuts),
        microbatches=options.microbatches,
        schedule=options.schedule or "1f1b",
    )


def _servers(options: argparse.Namespace) -> Strategy:
    servers = 1 if options.servers is None else options.servers
    return ParameterServerStrategy(servers, options.devices)


def _tensor(options: argparse.Namespace) -> Strategy:
    if options.data is None:
        return TensorParallelStrategy(options.devices, num_tensor_shards=options.shares)
    data = _replicas(options.data)
    return HybridStrategy(data, tensor=options.devices or 2, num_tensor_shards=options.shares)


_PIPELINE_OPTIONS = ("cuts", "microbatches", "schedule")


def _pipeline(options: argparse.Namespace) -> Strategy:
    return PipelineStrategy(
        options.devices, _names(options.cuts), options.microbatches, options.schedule or "1f1b"
    )


def _hybrid(options: argparse.Namespace) -> Strategy:
    return HybridStrategy(
        _replicas(options.data),
        options.devices,
        cuts=_names(options.cuts),
        microbatches=options.microbatches,
        schedule=options.schedule or "1f1b",
        tensor=options.tensor,
    )


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _replicas(text: str | None) -> int | list[int]:
    try:
        counts = [int(count) for count in (text or "1").split(",")]
    except ValueError as error:
        raise OptionError(
            "--data must be a number of replicas, or one for each stage.",
            received=text,
            fix="Use --data 2, or --data 3,1.",
        ) from error
    return counts if len(counts) > 1 else counts[0]


_STRATEGIES: dict[str, Callable[[argparse.Namespace], Strategy]] = {
    "auto": lambda options: AutoStrategy(devices=options.devices),
    "single": _single,
    "mirrored": lambda options: MirroredStrategy(options.devices, num_shares=options.shares),
    "sharded": lambda options: FullyShardedStrategy(options.devices, num_shares=options.shares),
    "tpu": lambda options: TPUStrategy(options.devices, num_shares=options.shares),
    "pipeline": _pipeline,
    "hybrid": _hybrid,
    "local": _local,
    "servers": _servers,
    "tensor": _tensor,
}


STRATEGIES = tuple(_STRATEGIES)


# --- targets ------------------------------------------------------------------------------------


def load_job(target: str, command: str) -> Job:
    """The Job that a TARGET's function returns.

    Args:
        target: as the user wrote it.
        command: of ``lockstep``, for messages.

    Raises:
        OptionError: there is no such file or function, it raises, or returns something else.
    """
    path, name = _parse(target, command)
    make = _function(_import(path), name)
    job = _call_user_code(f"{name} of {path.name} must not raise.", path, make)
    if not isinstance(job, Job):
        raise OptionError(
            f"{name} of {path.name} must return a lockstep.Job.",
            received=type(job).__name__,
            fix="Return lockstep.Job(model, loss, optimizer, data, batch_size).",
        )
    return job


def _parse(target: str, command: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        raise OptionError(
            "A TARGET must be file.py:function.",
            received=target,
            fix=f"For example: lockstep {command} job.py:make_job",
        )
    path = Path(file).resolve()
    if not path.is_file():
        raise OptionError(
            "TARGET's file must exist.", received=file, fix=f"Check its path: {path}."
        )
    return path, name


def _import(path: Path) -> ModuleType:
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and _file_of(loaded) == path:
        return loaded
    if loaded is not None or name in sys.stdlib_module_names or not name.isidentifier():
        raise OptionError(
            "The file's name must be importable, and not another module's.",
            received=path.name,
            fix="Rename it, for example to job.py.",
        )
    sys.path.insert(0, str(path.parent))  # helpers get this path, too
    importlib.invalidate_caches()
    module: ModuleType = _call_user_code(
        f"{path.name} must be importable.", path, lambda: importlib.import_module(name)
    )
    return module


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()


def _function(module: ModuleType, name: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]  # the user's
    defined = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    raise OptionError(
        f"{module.__name__}.py has no function of this name.",
        received=name,
        fix=f"It defines: {', '.join(defined) or 'none'}.",
    )


def _call_user_code(what: str, path: Path, call: Callable[[], Any]) -> Any:
    """Call the user's code; its errors become one line with the place."""
    try:
        return call()
    except LockstepError:
        raise
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        place = f" (line {lines[-1]} of {path.name})" if lines else ""
        raise OptionError(
            what,
            received=f"{type(error).__name__}: {error}{place}",
            fix="Run the function alone for the whole traceback.",
        ) from error
