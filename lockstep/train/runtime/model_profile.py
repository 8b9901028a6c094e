"""Measured costs of models and of runs, in the user's cache folder, and what an optimizer costs.

There is a file for each model, batch and machine, and one for what runs took. One that cannot be
read is written anew.
"""

import os
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn

from lockstep.capture.graph import with_total_seconds
from lockstep.capture.measuring import measure_model, timed
from lockstep.capture.tracing import Trace
from lockstep.cluster.devices import processor_name, usable_cores
from lockstep.cluster.topology import Cluster, Host
from lockstep.comm.shared_memory.memory_usage import resident_memory
from lockstep.data.trees import Tree
from lockstep.disk import CacheFile, cache_folder
from lockstep.errors import PlanError
from lockstep.graph.layer_graph import LayerGraph, OptimizerCosts
from lockstep.launch.health.machine_measuring import busy_cores, measured
from lockstep.parallel.data_parallel.forward import call_model
from lockstep.parallel.settings import num_threads
from lockstep.plan.cost.corrections import RunCost, learned
from lockstep.train.optim.fused_step import step_in_fastest_form

# An optimizer is timed on so many elements, so often.
_ELEMENTS = 1 << 20
_STEPS = 5

# The number of runs of one machine that are kept.
_MOST_RUNS = 100
RUNS = CacheFile("runs.json", dict[str, list[RunCost]], "What the run took")


def folder() -> Path:
    """See ``disk.cache_folder``."""
    return cache_folder() / "profiles"


def cached_graph(key: str, measure: Callable[[], LayerGraph]) -> LayerGraph:
    """The graph stored under this key, or else the measured one, which is stored."""
    name = f"{key}.json"
    try:
        return LayerGraph.load(folder() / name)
    except FileNotFoundError:
        pass  # not measured yet
    except (OSError, PlanError) as error:
        warnings.warn(f"{folder() / name} is measured anew: {error}", stacklevel=2)
    graph = measure()
    try:
        path = folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        graph.save(path)
    except OSError as error:
        warnings.warn(f"The measured costs cannot be remembered: {error}.", stacklevel=2)
    return graph


def this_machine(cluster: Cluster, precision: str, graph: LayerGraph) -> Cluster:
    """The Cluster with what is known of this host: its speed, this process's memory, past runs.

    Args:
        cluster: this host is its first.
        precision: of the Plans.
        graph: of the model that this process has.
    """
    first, *others = measured(cluster, precision).hosts
    model = sum(one.num_bytes for one in graph.parameters)
    first = msgspec.structs.replace(
        first,
        speed_together=graph.speed_together,
        script_bytes=max(resident_memory() - model, 0),
        corrections=learned(known_runs(first)),
    )
    return msgspec.structs.replace(cluster, hosts=(first, *others))


def remember_run(run: RunCost) -> None:
    """Keep what a run on this machine took, to correct later predictions."""
    runs, machine = RUNS.read() or {}, _machine()
    RUNS.write({**runs, machine: [*runs.get(machine, []), run][-_MOST_RUNS:]})


def known_runs(host: Host) -> list[RunCost]:
    """What runs on this host's cores took; none where there are accelerators."""
    return [] if host.accelerators else (RUNS.read() or {}).get(_machine(), [])


def _machine() -> str:
    return f"{processor_name()}, {len(os.sched_getaffinity(0))} cores"


def timed_graph(graph: LayerGraph, model: nn.Module, trace: Trace, inputs: Tree) -> LayerGraph:
    """The graph with times of the whole model: alone, beside busy cores, and with all threads.

    Args:
        graph: with the costs of layers one by one.
        model: the graph's, not on the meta device.
        trace: of the model, in training.
        inputs: as many samples as the costs are for.
    """
    measure = partial(measure_model, model, trace, partial(call_model, model, inputs))
    with num_threads(1):  # as ranks on cores have
        alone = measure()
    graph, seconds = with_total_seconds(graph, *alone), sum(alone)
    on_cores = all(one.is_cpu for one in model.parameters())
    if on_cores and (others := usable_cores() - 1):
        with num_threads(1), busy_cores(others):
            together = sum(measure())
        graph = msgspec.structs.replace(graph, speed_together=min(seconds / together, 1.0))
    if torch.get_num_threads() > 1:
        with_threads = sum(measure())
        graph = msgspec.structs.replace(graph, threads_speed=max(seconds / with_threads, 1.0))
    return graph


def profile_optimizer(optimizer: Any) -> OptimizerCosts:
    """What an optimizer keeps and takes for an element; defaults if it cannot be tried.

    Args:
        optimizer: of torch, or a class or function that makes one from parameters.
    """
    weight = nn.Parameter(torch.zeros(_ELEMENTS // 1024, 1024))
    try:
        made = _alike(optimizer, weight)
        seconds = _step_seconds(made, weight)
    except Exception:  # an optimizer of the user's own may need its own parameters
        return OptimizerCosts()
    kept = sum(
        value.numel() for value in made.state[weight].values() if isinstance(value, torch.Tensor)
    )
    slots = round(kept / _ELEMENTS, 2)
    return OptimizerCosts(slots=slots, seconds_per_element=seconds / _ELEMENTS)


def _alike(optimizer: Any, weight: nn.Parameter) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = partial(type(optimizer), **optimizer.defaults)
    return cast(torch.optim.Optimizer, optimizer([weight]))


def _step_seconds(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> float:
    times = []
    for _ in range(_STEPS + 1):
        weight.grad = torch.ones_like(weight)
        times.append(timed(partial(step_in_fastest_form, optimizer, optimizer.step)))
    return statistics.median(times[1:])
