"""The engine that moves tensors between the ranks of a Plan, as users choose it.

By default ranks on the cores of a host share memory, and Lockstep's own channels join hosts. Ranks
on accelerators share none: a backend of torch.distributed moves their tensors, that of the device
or one that the user names, which works on cores as well. Then every rank has parameters of its
own, and gradients are exchanged as they are: to have a weight's gradient formed from all
activations (``LayerPlacement.row_limit``) pays where each rank forms its rows of it, and not where
all form the whole. Whoever has asked for a number of shares on cores wants the bits that shared
memory gives, so there it is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lockstep.cluster.topology import Cluster
from lockstep.errors import DeviceError, OptionError, Problems
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.devices import is_cpu, kind_of
from lockstep.plan.engine_kinds import ProcessGroup
from lockstep.plan.makers.data_parallel import Maker, Wrapping
from lockstep.plan.spec import Plan

# The backend that moves what lies on devices of a kind. gloo moves what lies in host memory, and
# what any device has by way of it.
NATIVE_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}

BACKENDS = ("gloo", *NATIVE_BACKENDS.values())


@dataclass(frozen=True, kw_only=True)
class OverProcessGroup(Wrapping):
    """Another maker's Plan, over torch.distributed where its ranks share no memory.

    Attributes:
        backend: torch.distributed's; None is the devices' own, and none for cores.
        keeps_bits: gradients are formed as in shared memory, though it takes longer.
    """

    backend: str | None
    keeps_bits: bool = False

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            OptionError: the backend is one of other devices.
        """
        plan = self.maker(graph, cluster, batch_size)
        on_cores = is_cpu(plan.devices)
        if self.backend is None and on_cores:
            return plan
        backend = backend_for(self.backend, plan.devices)
        layers = plan.layers
        if not (self.keeps_bits and on_cores):
            layers = tuple(msgspec.structs.replace(layer, row_limit=0) for layer in layers)
        if plan.num_ranks == 1:
            return plan if on_cores else msgspec.structs.replace(plan, layers=layers)
        return msgspec.structs.replace(plan, engine=ProcessGroup(backend=backend), layers=layers)


def backend_for(name: str | None, devices: Sequence[str]) -> str:
    """The backend for some devices, where a user has named one or not.

    Raises:
        OptionError: the one that is named is for others.
    """
    kind = kind_of(devices[0])
    native = NATIVE_BACKENDS.get(kind, "gloo")
    if name not in (None, "gloo", native):
        raise OptionError(
            f"engine={name!r} does not move tensors of devices of kind {kind!r}.",
            received=f"devices {', '.join(devices)}",
            fix=f"Use engine={native!r}, or leave it out.",
        )
    return name or native


def over(engine: str | None, maker: Maker, *, num_shares: int | None = None) -> Maker:
    """A maker of Plans with the engine that the user names; None is what fits the devices."""
    return OverProcessGroup(maker=maker, backend=engine, keeps_bits=num_shares is not None)


def check_engine(problems: Problems, engine: object) -> None:
    """Note an unknown engine."""
    if engine is not None and engine not in BACKENDS:
        problems.add(
            "`engine` must be a backend of torch.distributed, or None.",
            received=f"engine={engine!r}",
            fix=f"Use one of {', '.join(BACKENDS)}, or leave it out for what fits the devices.",
        )


def check_leave(devices: Sequence[str], engine: str | None) -> None:
    """Check that no device is named twice, unless an engine is named.

    Raises:
        DeviceError: one is.
    """
    # Cores are taken as they come where they have no number.
    numbered = [name if ":" in name else f"{name}:0" for name in devices if name != "cpu"]
    twice = sorted({name for name in numbered if numbered.count(name) > 1})
    if twice and engine is None:
        raise DeviceError(
            "A device can have one rank: several would share its memory and time.",
            received=f"{twice[0]!r} {numbered.count(twice[0])} times",
            fix='Name each device once; for a test pass engine="gloo", which brings tensors from '
            "rank to rank by way of host memory.",
        )
