"""Sharded data parallelism."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from lockstep.cluster import tpu
from lockstep.cluster.devices import discover
from lockstep.cluster.environment import find_devices, find_place
from lockstep.cluster.place import Reach
from lockstep.errors import OptionError, Problems
from lockstep.options import check_timeout
from lockstep.plan.devices import Devices, check_devices, device_names, is_cpu, kind_of
from lockstep.plan.engines import backend_for, check_engine, check_leave, over
from lockstep.plan.makers.data_parallel import Maker, Mirrored
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.makers.sharded import FullySharded, as_units
from lockstep.plan.makers.threaded import check_threads, threaded
from lockstep.plan.sharding import IN_HOST_MEMORY, is_in
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import check_shares
from lockstep.strategies.multi_worker import num_replicas
from lockstep.tracebacks import public_methods

_LEVELS = ("slots", "gradients", "parameters")


@public_methods
class FullyShardedStrategy(Strategy):
    """Data parallelism whose devices divide parameters, gradients and the optimizer's slots.

    The parameters stay the user's own: they keep their names, shapes and identities. A unit's
    parameters are gathered before its pass and freed after it. The cores of one host share memory:
    there all have one copy of the parameters, from which none need be gathered.

    Args:
        devices: as in ``MirroredStrategy``; no TPUs. If a launcher has started several hosts, as
            for ``MultiWorkerMirroredStrategy``: their number on each host.
        level: what the devices divide: ``"slots"``, the optimizer's; ``"gradients"`` and slots; or
            ``"parameters"``, gradients and slots (levels 1, 2 and 3 of ZeRO).
        units: names of the modules whose parameters are gathered together; a list of names for
            several modules in one unit. None takes the entries of lists of modules, and the layers
            outside of lists; a model of at most 64 MiB is gathered on cores once in each step then,
            and not for each use. What is in no unit, or used by several, stays on every device.
        recompute: activations are not kept from forward to backward, but computed again, with the
            same random numbers and buffers: True for each module of a unit, or names of modules.
        offload: ``"slots"``: the optimizer's slots lie in the memory of the accelerators' host, and
            come to the devices part by part in each update. ``"parameters"``: so do parameters and
            gradients, and a unit comes to the devices while the one before it is used. On cores all
            lies there anyway. A directory: slots lie in a file there, without a name, and are read
            before a step's update of each part and written behind it. For torch's optimizers that
            treat each element separately, on one device as well. None keeps all on the devices.
        num_shares: as in ``MirroredStrategy``.
        engine: what moves tensors between devices. None on accelerators is their own backend, as in
            ``MirroredStrategy``. None on cores is ``"gloo"``, for all but the parameters of one
            host; with ``engine="gloo"`` each core has memory of its own for these, too.
        threads_per_device: as in ``MirroredStrategy``.
        timeout_seconds: longest wait for a replica; a longer one is an error.

    Raises:
        DeviceError: devices that do not exist, of two kinds, or named twice.
        OptionError: TPUs, or another invalid argument.
    """

    reach: Reach = "all hosts"
    _groups: Mapping[str, int] = {}  # see FullySharded
    _small_bytes = 1 << 26  # likewise; a process with torch takes several times as much

    def __init__(
        self,
        devices: Devices = None,
        *,
        level: str = "parameters",
        units: Sequence[str | Sequence[str]] | None = None,
        recompute: bool | Sequence[str] = False,
        offload: str | os.PathLike[str] | None = None,
        num_shares: int | None = None,
        engine: str | None = None,
        threads_per_device: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        check_devices(devices)
        if isinstance(devices, Sequence):
            check_leave(devices, engine)
            self.reach = "one host"
        problems = Problems()
        if level not in _LEVELS:
            problems.add(
                "`level` must name what the devices divide.",
                received=f"level={level!r}",
                fix=f"Use one of {', '.join(map(repr, _LEVELS))}.",
            )
        _check_units(problems, units)
        _check_recompute(problems, recompute)
        _check_offload(problems, offload, level)
        check_shares(problems, num_shares)
        check_engine(problems, engine)
        check_threads(problems, threads_per_device)
        check_timeout(problems, timeout_seconds)
        problems.raise_if_any(OptionError)
        if devices is None and (self.reach == "one host" or find_place(os.environ) is None):
            devices = find_devices(os.environ)
        self.devices = devices
        self.level = level
        self.units = as_units(units)
        self.recompute = recompute if isinstance(recompute, bool) else tuple(recompute)
        self.offload = offload if offload in (None, *IN_HOST_MEMORY) else os.path.abspath(offload)
        self.num_shares = num_shares
        self.threads_per_device = threads_per_device
        self.timeout_seconds = timeout_seconds
        names = device_names(self.devices, discover().hosts[0])
        if kind_of(names[0]) == tpu.KIND:
            raise OptionError(
                "FullyShardedStrategy frees and takes memory within a step, which torch_tpu has no "
                "function for.",
                received=f"devices {', '.join(names)}",
                fix="Use TPUStrategy.",
            )
        self._mirrored: Mirrored | MirroredHosts
        if isinstance(devices, Sequence):
            self._mirrored = Mirrored(devices=tuple(devices), num_shares=num_shares)
        elif find_place(os.environ) is None:
            self._mirrored = Mirrored(devices=devices, num_shares=num_shares)
        else:
            self._mirrored = MirroredHosts(devices_per_host=devices, num_shares=num_shares)
        self._shares_parameters = engine is None
        self.engine = engine or ("gloo" if is_cpu(names) else None)
        backend_for(self.engine, names)

    def maker(self, precision: str = "fp32") -> Maker:
        maker = over(self.engine, replace(self._mirrored, precision=precision))
        maker = threaded(self.threads_per_device, maker)
        return FullySharded(
            maker=maker,
            level=self.level,
            units=self.units,
            recompute=self.recompute,
            shares_parameters=self._shares_parameters,
            offload=self.offload,
            small_bytes=self._small_bytes,
            **self._groups,
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all hosts; see ``MultiWorkerMirroredStrategy``."""
        if isinstance(self._mirrored, MirroredHosts):
            return num_replicas(self._mirrored, self.timeout_seconds)
        return len(device_names(self.devices, discover().hosts[0]))


def sharded_replicas(
    data: int, shard: int, *, devices: Sequence[str] | None, **options: Any
) -> FullyShardedStrategy:
    """Groups of devices that each divide the parameters of a replica.

    Args:
        data: how many groups.
        shard: devices of each, in sequence.
        devices: names of all; None is accelerators if there are any, else cores.
        options: see ``FullyShardedStrategy``.

    Raises:
        DeviceError: see ``FullyShardedStrategy``.
        OptionError: likewise.
    """
    on_hosts = devices is None and find_place(os.environ) is not None
    made = FullyShardedStrategy(devices or (None if on_hosts else data * shard), **options)
    made._groups, made._shares_parameters = {"data": data, "shard": shard}, False
    made._small_bytes = 0
    if isinstance(made._mirrored, MirroredHosts):
        made._mirrored = replace(made._mirrored, num_devices=data * shard)
    return made


def _check_units(problems: Problems, units: object) -> None:
    if units is None:
        return
    names = [name for unit in _entries(units) for name in _entries(unit)]
    if isinstance(units, str) or not names or not all(isinstance(name, str) for name in names):
        problems.add(
            "`units` must be names of modules, or lists of them.",
            received=f"units={units!r}",
            fix='Use units=["blocks.0", "blocks.1"], for example.',
        )
    elif len({*names}) < len(names):
        problems.add(
            "A module can be in one unit.",
            received=f"units={units!r}",
            fix="Name each module once.",
        )


def _check_recompute(problems: Problems, recompute: object) -> None:
    names = [] if isinstance(recompute, bool) else _entries(recompute)
    is_list = isinstance(recompute, list | tuple) and names
    is_nested = any(is_in(str(one), str(other)) for one, other in permutations(names, 2))
    if not isinstance(recompute, bool) and (
        not is_list or is_nested or not all(isinstance(name, str) for name in names)
    ):
        problems.add(
            "`recompute` must be True, False, or a list of names of modules, none of them within "
            "another.",
            received=f"recompute={recompute!r}",
            fix='Use recompute=["blocks.0", "blocks.1"], for example.',
        )


def _check_offload(problems: Problems, offload: object, level: str) -> None:
    if offload == "parameters" != level:
        problems.add(
            'offload="parameters" is for parameters that are divided into units.',
            received=f"level={level!r}",
            fix='Leave `level` out, or use offload="slots".',
        )
    is_path = isinstance(offload, str | os.PathLike) and os.path.isdir(offload)
    if offload not in (None, *IN_HOST_MEMORY) and not is_path:
        problems.add(
            "`offload` must name what lies in host memory, or an existing directory, for a file "
            "with the optimizer's slots.",
            received=f"offload={offload!r}",
            fix=f"Use one of {', '.join(map(repr, IN_HOST_MEMORY))}, or make the directory on a "
            "disk with room for the slots.",
        )


def _entries(units: object) -> list[object]:
    """The entries of a list; anything else is one."""
    return list(units) if isinstance(units, list | tuple) else [units]
