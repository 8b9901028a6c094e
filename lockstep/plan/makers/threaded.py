"""Another maker's Plan whose ranks on cores compute with several threads each."""

from dataclasses import dataclass

import msgspec

from lockstep.cluster.topology import Cluster
from lockstep.errors import OptionError, Problems
from lockstep.graph.layer_graph import LayerGraph
from lockstep.options import check_count
from lockstep.plan.devices import is_cpu
from lockstep.plan.makers.data_parallel import Maker, Wrapping
from lockstep.plan.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Threaded(Wrapping):
    """Another maker's Plan, with so many threads of each rank on a core.

    Attributes:
        threads: of each.
    """

    threads: int

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            OptionError: its ranks are on accelerators.
        """
        plan = self.maker(graph, cluster, batch_size)
        if not is_cpu(plan.devices):
            raise OptionError(
                "Only ranks on cores have a number of threads.",
                received=f"threads_per_device={self.threads} with {plan.devices[0]}",
                fix="Leave `threads_per_device` out.",
            )
        cores = sum(host.num_cores for host in cluster.hosts)
        notes = plan.notes
        if plan.num_ranks <= cores < plan.num_ranks * self.threads:
            crowd = f"{plan.num_ranks} processes of {self.threads} threads share {cores} cores"
            notes = (*notes, f"{crowd}: right for tests, not for speed.")
        return msgspec.structs.replace(plan, threads_per_device=self.threads, notes=notes)


def threaded(threads_per_device: int | None, maker: Maker) -> Maker:
    """A maker of Plans with as many threads as the user asks for; None is one of each rank."""
    if threads_per_device is None:
        return maker
    return Threaded(maker=maker, threads=threads_per_device)


def check_threads(problems: Problems, threads_per_device: object) -> None:
    """Note a number that is neither None nor an integer of at least 1."""
    fix = "Leave it out for one thread of each process on a core."
    check_count("threads_per_device", threads_per_device, problems, optional=True, fix=fix)
