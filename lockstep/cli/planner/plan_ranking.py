"""The ranked table of ``lockstep plan``: a model's graph, the devices, and what would be if."""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cluster.cluster_file import read_cluster
from lockstep.cluster.devices import discover
from lockstep.cluster.topology import Cluster, Device, Host, Link
from lockstep.errors import OptionError
from lockstep.formatting import format_bytes, format_count, format_time, parse_bytes
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.cost.corrections import RunCost, family_of, learned
from lockstep.plan.cost.plan_cost import cost_of
from lockstep.plan.search.candidates import Candidate, Given, Problem
from lockstep.plan.search.ranking import OBJECTIVES, Ranked, best_plans
from lockstep.plan.spec import Plan
from lockstep.report.run_report import report_of

# Of the table in a file.
_WIDTH = 120


def add_ranking_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the ranking."""
    ranking = parser.add_argument_group("ranking, without the name of a strategy")
    ranking.add_argument("--cluster", metavar="FILE", help="the devices, as a TOML file")
    ranking.add_argument("--batch-size", type=int, metavar="B", help="of the global batch")
    ranking.add_argument("--memory", metavar="SIZE", help="of each device, such as 24GiB")
    ranking.add_argument(
        "--objective", choices=OBJECTIVES, default="time", help="rank by (default: time)"
    )
    ranking.add_argument(
        "--top", type=int, default=10, metavar="N", help="rows to show (default: 10)"
    )
    ranking.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="RUN",
        help="folder of a run of this model and batch: its times correct the predictions",
    )
    ranking.add_argument("--output", metavar="FILE", help="write the best Plan there")
    ranking.add_argument("--graph", metavar="FILE", help="a saved LayerGraph, in place of TARGET")
    ranking.add_argument("--save-graph", metavar="FILE", help="write the measured LayerGraph there")
    ranking.add_argument(
        "--what-if-network", type=float, default=1.0, metavar="X", help="links X times as fast"
    )
    ranking.add_argument(
        "--what-if-memory", type=float, default=1.0, metavar="X", help="memory X times as large"
    )


def rank(options: argparse.Namespace) -> int:
    """Print the ranking, and write the best Plan.

    Raises:
        LockstepError: the options, the file or the job are invalid, or nothing fits.
    """
    _check_numbers(options)
    cluster = _cluster(options)
    graph, batch_size = _graph(options)
    cluster = _corrected(options, graph, cluster, batch_size)
    problem = Problem(
        graph=graph, cluster=cluster, batch_size=batch_size, num_devices=options.devices
    )
    _check_batch(batch_size, options.devices)
    rows = best_plans(problem, options.objective, _own(options, problem))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(ranking_table(rows[: options.top], batch_size))
    hidden = len(rows) - options.top
    if hidden > 0:
        console.print(f"and {hidden} more")
    if options.output:
        rows[0].candidate.plan(graph, batch_size).save(options.output)
    return 0


def ranking_table(rows: list[Ranked], batch_size: int) -> Table:
    """Plans, their costs, and why they lose."""
    table = Table("plan", box=None, pad_edge=False)
    for heading in ("step", "samples/s", "memory", "bubble", "sent"):
        table.add_column(heading, justify="right")
    table.add_column("why not")
    for row in rows:
        cost = row.candidate.cost
        seconds = cost.step.total
        table.add_row(
            Text(row.candidate.name),
            format_time(seconds),
            format_count(batch_size / seconds) if seconds else "",
            format_bytes(cost.peak.total),
            f"{100 * cost.step.bubble / seconds:.0f}%" if seconds else "",
            format_bytes(cost.bytes_sent),
            Text(row.reason or "the best"),
        )
    return table


# --- what is asked for ----------------------------------------------------------------------------


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("devices", "batch_size", "top"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(
                f"--{name.replace('_', '-')} must be a number of at least 1.",
                received=value,
                fix="Leave it out for the default.",
            )
    for name in ("what_if_network", "what_if_memory"):
        factor = getattr(options, name)
        if not 0 < factor < math.inf:
            raise OptionError(
                f"--{name.replace('_', '-')} must be a factor above 0.",
                received=factor,
                fix="Use 10 for ten times as much.",
            )
    if options.memory is not None and not parse_bytes(options.memory):
        raise OptionError(
            "--memory must be a size above 0.", received=options.memory, fix="For example 24GiB."
        )


def _check_batch(batch_size: int, devices: int | None) -> None:
    if devices is not None and batch_size < devices:
        raise OptionError(
            "Every device must have a sample of the batch.",
            received=f"a batch of {batch_size} on {devices} devices",
            fix=f"Use --batch-size {devices} or more, or fewer devices.",
        )


def _cluster(options: argparse.Namespace) -> Cluster:
    """The devices of the file, or this host's, with what would be if."""
    if options.cluster is None:
        from lockstep.launch.health.machine_measuring import measured

        cluster = measured(discover())
    else:
        cluster = read_cluster(options.cluster)
    memory = None if options.memory is None else parse_bytes(options.memory)
    hosts = tuple(
        _changed(host, memory, options.what_if_memory, options.what_if_network)
        for host in cluster.hosts
    )
    networks = tuple(
        msgspec.structs.replace(one, link=_faster(one.link, options.what_if_network))
        for one in cluster.networks
    )
    return Cluster(hosts=hosts, networks=networks)


def _changed(host: Host, memory: int | None, more: float, faster: float) -> Host:
    def with_memory(device: Device) -> Device:
        size = device.memory_bytes if memory is None else memory
        return msgspec.structs.replace(device, memory_bytes=round(size * more))

    return msgspec.structs.replace(
        host,
        devices=tuple(map(with_memory, host.devices)),
        link=None if host.link is None else _faster(host.link, faster),
    )


def _faster(link: Link, factor: float) -> Link:
    return Link(
        latency_seconds=link.latency_seconds / factor,
        bytes_per_second=link.bytes_per_second * factor,
    )


def _graph(options: argparse.Namespace) -> tuple[LayerGraph, int]:
    """The graph and the batch size: from a file, or measured."""
    if options.graph is not None:
        try:
            graph = LayerGraph.load(options.graph)
        except OSError as error:
            raise OptionError(
                "The graph's file must exist.", received=error, fix="Check its path."
            ) from error
        return graph, options.batch_size or max(graph.samples, 1)
    from lockstep.cli.target import load_job

    job = load_job(options.target, "plan")
    batch_size = options.batch_size or job.batch_size
    graph = _measured(job, batch_size)
    if options.save_graph:
        graph.save(options.save_graph)
    return graph, batch_size


def _measured(job: Any, batch_size: int) -> LayerGraph:
    """The graph of a Job's model, on a batch of its data."""
    import torch

    from lockstep.frontends.plan_inputs import plan_inputs
    from lockstep.train.runtime.model_profile import profile_optimizer
    from lockstep.train.runtime.planning import Planning

    module, precision, samples, dims = plan_inputs(job.model, "fp32", job.data, job.dims)
    with torch.inference_mode(False):  # tracing needs gradients
        graph = Planning(module, dims).graph(samples, batch_size, precision)
    return msgspec.structs.replace(graph, optimizer=profile_optimizer(job.optimizer))


def _corrected(
    options: argparse.Namespace, graph: LayerGraph, cluster: Cluster, batch_size: int
) -> Cluster:
    """The Cluster with corrections by what the given runs, or all known ones, have taken."""
    if options.cluster is not None and not options.run:
        return cluster
    from lockstep.train.runtime.model_profile import known_runs

    first, *others = cluster.hosts
    runs = [_run_cost(Path(run), graph, cluster, batch_size) for run in options.run]
    first = msgspec.structs.replace(first, corrections=learned(runs or known_runs(first)))
    return msgspec.structs.replace(cluster, hosts=(first, *others))


def _run_cost(folder: Path, graph: LayerGraph, cluster: Cluster, batch_size: int) -> RunCost:
    """What a run under any strategy took, and what is predicted of its Plan."""
    report = report_of(folder)
    if report.plan is None:
        raise OptionError(
            "--run must be a run whose record has a Plan.",
            received=os.fspath(folder),
            fix="Train some steps with `fit(record=...)`.",
        )
    cost = cost_of(report.plan, graph, cluster, batch_size)
    return RunCost(
        family=family_of(report.plan),
        seconds=(cost.step.total, report.step_seconds),
        num_bytes=(cost.all_bytes, report.peak_bytes),
    )


def _own(options: argparse.Namespace, problem: Problem) -> list[Candidate]:
    """The user's own Plan, if there is one."""
    if options.strategy is None:
        return []
    path = Path(options.strategy)
    if not path.is_file():
        raise OptionError(
            "--strategy must name a strategy, or the file of a Plan.",
            received=os.fspath(path),
            fix="See `lockstep plan --help` for the strategies.",
        )
    plan = Plan.load(path)
    candidate = Candidate(
        name=f"{path.name} ({plan.strategy})",
        cost=cost_of(plan, problem.graph, problem.cluster, problem.batch_size),
        maker=Given(plan),
        num_devices=plan.num_ranks,
        cluster=problem.cluster,
        family=family_of(plan),
    )
    return [candidate]
