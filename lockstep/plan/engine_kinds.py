"""Where parameters are, and what moves tensors between ranks."""

from collections.abc import Sequence
from typing import ClassVar

from lockstep.plan.plan_part import PlanPart


class SharedMemory(PlanPart, frozen=True, kw_only=True, tag="shared memory"):
    """Ranks of a host share the parameters' memory; Lockstep's own channels join hosts.

    Attributes:
        shares_memory: whether ranks of one host have the same parameters in the same place.
        name: for people.
    """

    shares_memory: ClassVar[bool] = True
    name: ClassVar[str] = "shared memory"

    def domains(self, hosts: Sequence[range]) -> list[range]:
        """The ranks that share parameters: those of each host."""
        return list(hosts)


class ProcessGroup(PlanPart, frozen=True, kw_only=True, tag="process group"):
    """Every rank has parameters of its own, and the optimizer's state of what it updates.

    Tensors go from rank to rank through torch.distributed.

    Attributes:
        backend: torch.distributed's name of it.
        shares_memory: see ``SharedMemory``.
    """

    backend: str

    shares_memory: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """For people."""
        return self.backend

    def domains(self, hosts: Sequence[range]) -> list[range]:
        """The ranks that share parameters: each rank has its own."""
        return [range(rank, rank + 1) for ranks in hosts for rank in ranks]


Engine = SharedMemory | ProcessGroup
