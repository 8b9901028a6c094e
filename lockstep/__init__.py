"""Lockstep: many devices, one result.

The public names are loaded when they are first used, so that ``import lockstep`` is fast: the first
name that needs torch imports it. Keras uses its PyTorch backend, unless another was chosen before.
"""

import os
import random
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep import tracebacks
from lockstep.version import __version__ as __version__

if TYPE_CHECKING:
    from lockstep import callbacks as callbacks
    from lockstep import checkpoint as checkpoint
    from lockstep import data as data
    from lockstep import keras  # noqa: F401
    from lockstep.capture.scopes import device as device
    from lockstep.custom_loops.replicas import all_mean as all_mean
    from lockstep.custom_loops.replicas import init as init
    from lockstep.custom_loops.replicas import num_replicas as num_replicas
    from lockstep.custom_loops.replicas import rank as rank
    from lockstep.custom_loops.replicas import share as share
    from lockstep.data.own_loss import OwnLoss as OwnLoss
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.frontends.cross_replica import CrossReplicaOptimizer as CrossReplicaOptimizer
    from lockstep.plan.averaging import Nesterov as Nesterov
    from lockstep.plan.program.compression import PowerSGD as PowerSGD
    from lockstep.plan.program.compression import TopK as TopK
    from lockstep.plan.spec import Plan as Plan
    from lockstep.proof.job import Job as Job
    from lockstep.proof.recording.recorder import record as record
    from lockstep.proof.records.outcome import compare as compare
    from lockstep.proof.verification import verify_job
    from lockstep.strategies.automatic import AutoStrategy as AutoStrategy
    from lockstep.strategies.base import Strategy as Strategy
    from lockstep.strategies.fully_sharded import FullyShardedStrategy as FullyShardedStrategy
    from lockstep.strategies.hybrid import HybridStrategy as HybridStrategy
    from lockstep.strategies.local_sgd import LocalSGDStrategy as LocalSGDStrategy
    from lockstep.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from lockstep.strategies.multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from lockstep.strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from lockstep.strategies.pipeline import PipelineStrategy as PipelineStrategy
    from lockstep.strategies.single import SingleDeviceStrategy as SingleDeviceStrategy
    from lockstep.strategies.tensor_parallel import TensorParallelStrategy as TensorParallelStrategy
    from lockstep.strategies.tpu import TPUClusterResolver as TPUClusterResolver
    from lockstep.strategies.tpu import TPUStrategy as TPUStrategy
    from lockstep.strategies.tpu import initialize_tpu_system as initialize_tpu_system
    from lockstep.train.batch_size_search.batch_size import BatchSizeSearch as BatchSizeSearch
    from lockstep.train.callbacks.callback import Callback as Callback
    from lockstep.train.checkpointing.checkpoints import Checkpoint as Checkpoint
    from lockstep.train.history import History as History
    from lockstep.train.input.input_wait import InputBoundWarning as InputBoundWarning
    from lockstep.train.optim.learning_rates import Schedule as Schedule
    from lockstep.train.optim.wrapped_updaters import EMA as EMA
    from lockstep.train.trainer import Trainer as Trainer

    verify = verify_job


tracebacks.install()

# Keras chooses its backend when it is imported; models of ``strategy.scope()`` need this one.
if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "torch")

# Public name -> (module that defines it, its name there; "" is the module itself).
_HOMES = {
    "AutoStrategy": ("lockstep.strategies.automatic", "AutoStrategy"),
    "BatchSizeSearch": ("lockstep.train.batch_size_search.batch_size", "BatchSizeSearch"),
    "Callback": ("lockstep.train.callbacks.callback", "Callback"),
    "Checkpoint": ("lockstep.train.checkpointing.checkpoints", "Checkpoint"),
    "CrossReplicaOptimizer": ("lockstep.frontends.cross_replica", "CrossReplicaOptimizer"),
    "EMA": ("lockstep.train.optim.wrapped_updaters", "EMA"),
    "FullyShardedStrategy": ("lockstep.strategies.fully_sharded", "FullyShardedStrategy"),
    "HybridStrategy": ("lockstep.strategies.hybrid", "HybridStrategy"),
    "History": ("lockstep.train.history", "History"),
    "InputBoundWarning": ("lockstep.train.input.input_wait", "InputBoundWarning"),
    "Job": ("lockstep.proof.job", "Job"),
    "LocalSGDStrategy": ("lockstep.strategies.local_sgd", "LocalSGDStrategy"),
    "LockstepError": ("lockstep.errors", "LockstepError"),
    "MirroredStrategy": ("lockstep.strategies.mirrored", "MirroredStrategy"),
    "MultiWorkerMirroredStrategy": (
        "lockstep.strategies.multi_worker",
        "MultiWorkerMirroredStrategy",
    ),
    "Nesterov": ("lockstep.plan.averaging", "Nesterov"),
    "OwnLoss": ("lockstep.data.own_loss", "OwnLoss"),
    "ParameterServerStrategy": (
        "lockstep.strategies.parameter_server",
        "ParameterServerStrategy",
    ),
    "PipelineStrategy": ("lockstep.strategies.pipeline", "PipelineStrategy"),
    "Plan": ("lockstep.plan.spec", "Plan"),
    "PowerSGD": ("lockstep.plan.program.compression", "PowerSGD"),
    "Schedule": ("lockstep.train.optim.learning_rates", "Schedule"),
    "SingleDeviceStrategy": ("lockstep.strategies.single", "SingleDeviceStrategy"),
    "Strategy": ("lockstep.strategies.base", "Strategy"),
    "TPUClusterResolver": ("lockstep.strategies.tpu", "TPUClusterResolver"),
    "TensorParallelStrategy": ("lockstep.strategies.tensor_parallel", "TensorParallelStrategy"),
    "TPUStrategy": ("lockstep.strategies.tpu", "TPUStrategy"),
    "TopK": ("lockstep.plan.program.compression", "TopK"),
    "Trainer": ("lockstep.train.trainer", "Trainer"),
    "all_mean": ("lockstep.custom_loops.replicas", "all_mean"),
    "callbacks": ("lockstep.callbacks", ""),
    "checkpoint": ("lockstep.checkpoint", ""),
    "compare": ("lockstep.proof.records.outcome", "compare"),
    "data": ("lockstep.data", ""),
    "device": ("lockstep.capture.scopes", "device"),
    "init": ("lockstep.custom_loops.replicas", "init"),
    "initialize_tpu_system": ("lockstep.strategies.tpu", "initialize_tpu_system"),
    "num_replicas": ("lockstep.custom_loops.replicas", "num_replicas"),
    "rank": ("lockstep.custom_loops.replicas", "rank"),
    "record": ("lockstep.proof.recording.recorder", "record"),
    "share": ("lockstep.custom_loops.replicas", "share"),
    "verify": ("lockstep.proof.verification", "verify_job"),
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name == "keras":  # not in ``__all__``: a star import must not replace Keras itself
        return _loaded("lockstep.keras")
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module_name, attribute = _HOMES[name]
    module = _loaded(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def _loaded(name: str) -> ModuleType:
    """A module; packages that it imports draw no number that the script would have drawn."""
    before = random.getstate()
    try:
        return import_module(name)
    finally:
        random.setstate(before)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "keras"])
