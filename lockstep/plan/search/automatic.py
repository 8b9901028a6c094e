"""The maker that chooses: it searches the Plans of all strategies for the one that costs least."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lockstep.cluster.topology import Cluster
from lockstep.formatting import first_few, format_bytes, format_time
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.makers.data_parallel import Maker, Measure, PlanTrials, Try, Wrapping, try_none
from lockstep.plan.search.candidates import Problem
from lockstep.plan.search.ranking import Ranked, best_plans
from lockstep.plan.search.tried import begun_first, tried
from lockstep.plan.spec import Plan

# Costs are measured on at most so many samples, and on a line from there on.
_MOST_SAMPLES = 128

# Candidates that a Plan's notes name beside the best.
_NUM_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Automatic(Maker):
    """The candidate that costs least on this host's devices.

    Attributes:
        objective: ``"time"`` or ``"memory"``.
        memory_bytes: that a device may hold; None is what it has.
        num_devices: at most; None is all.
        precision: see ``Plan``.
        num_trials: plans that are tried before one is chosen; None is by the training's length.
    """

    objective: str = "time"
    memory_bytes: int | None = None
    num_devices: int | None = None
    precision: str = "fp32"
    num_trials: int | None = None

    def sample_size(self, cluster: Cluster, batch_size: int) -> int:
        return min(batch_size, _MOST_SAMPLES)

    def choose(
        self,
        measure: Measure,
        cluster: Cluster,
        batch_size: int,
        attempt: Try = try_none,
        trials: PlanTrials | None = None,
    ) -> Maker:
        graph, devices = measure(self.sample_size(cluster, batch_size))
        rows = self._ranked(graph, devices, batch_size, attempt)
        begun = trials and trials.begun and begun_first(rows, trials.begun, attempt)
        if begun:
            rows = begun
        elif trials is not None and self.objective == "time":
            rows = tried(rows, trials, self.num_trials, attempt)
        return Chosen(maker=rows[0].candidate.maker, rows=tuple(rows))

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            PlanError: nothing fits into memory.
        """
        chosen = self.choose(lambda size: (graph, cluster), cluster, batch_size)
        return chosen(graph, cluster, batch_size)

    def _ranked(
        self, graph: LayerGraph, cluster: Cluster, batch_size: int, attempt: Try
    ) -> list[Ranked]:
        problem = Problem(
            graph=graph,
            cluster=cluster if self.memory_bytes is None else _limited(cluster, self.memory_bytes),
            batch_size=batch_size,
            num_devices=self.num_devices,
            precision=self.precision,
        )
        return best_plans(problem, self.objective, attempt=attempt)


@dataclass(frozen=True, kw_only=True)
class Chosen(Wrapping):
    """A chosen maker's Plan, with the reasons for the choice in its notes.

    Attributes:
        rows: all candidates, the best first.
    """

    rows: tuple[Ranked, ...]

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples."""
        plan = self.maker(graph, cluster, batch_size)
        return msgspec.structs.replace(plan, notes=(*plan.notes, *_notes(self.rows)))


def ranking_of(maker: Maker) -> tuple[Ranked, ...]:
    """The candidates among which a maker was chosen; none if it was not."""
    if isinstance(maker, Chosen):
        return maker.rows
    return ranking_of(maker.maker) if isinstance(maker, Wrapping) else ()


def _limited(cluster: Cluster, memory_bytes: int) -> Cluster:
    hosts = [
        msgspec.structs.replace(
            host,
            devices=tuple(
                msgspec.structs.replace(device, memory_bytes=memory_bytes)
                for device in host.devices
            ),
        )
        for host in cluster.hosts
    ]
    return msgspec.structs.replace(cluster, hosts=tuple(hosts))


def _notes(rows: Sequence[Ranked]) -> list[str]:
    """The best with its costs, why better ones cannot be used, and why the next ones lose."""
    best, measured = rows[0].candidate, rows[0].tried
    notes = [
        f"Chosen of {len(rows)} plans: {best.name}, expected to take "
        f"{format_time(best.cost.step.total)} a step and {format_bytes(best.cost.peak.total)} on a "
        f"rank{'' if measured is None else f'; a step of its trial took {format_time(measured)}'}."
    ]
    if failure := rows[0].failure:
        notes.append(f"No trial succeeded, so predictions decided: {failure.rstrip('.')}.")
    refused = [row for row in rows if row.is_refused]
    for reason in dict.fromkeys(row.reason.partition(". ")[0] for row in refused):
        names = [row.candidate.name for row in refused if row.reason.startswith(reason)]
        notes.append(f"Not {first_few(names)}: {reason}.")
    for row in [row for row in rows[1:] if not row.is_refused][:_NUM_NAMED]:
        seconds = format_time(row.candidate.cost.step.total)
        notes.append(f"Not {row.candidate.name}, {seconds}: {row.reason}.")
    return notes
