"""Synchronous data parallelism on TPUs, through Google's torch_tpu."""

import os
from collections.abc import Sequence

from lockstep.cluster import tpu as torch_tpu
from lockstep.cluster.devices import discover
from lockstep.cluster.environment import find_devices, find_place
from lockstep.errors import DeviceError, OptionError
from lockstep.plan.devices import Devices, check_devices, device_names, kind_of
from lockstep.plan.makers.data_parallel import Maker
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.tracebacks import public_methods


@public_methods
class TPUClusterResolver:
    """The TPUs of this host, for scripts from tf.distribute.

    Args:
        tpu: None, ``""`` or ``"local"``. Lockstep trains where the script runs, and reaches no TPU
            by a name or an address.

    Raises:
        OptionError: another value.
    """

    def __init__(self, tpu: str | None = None) -> None:
        if tpu not in (None, "", "local"):
            raise OptionError(
                "Lockstep trains on the TPUs of the host on which the script runs.",
                received=f"tpu={tpu!r}",
                fix='Run the script on the TPU\'s own host, with TPUClusterResolver(tpu="").',
            )

    def num_accelerators(self) -> dict[str, int]:
        """The number of the host's TPUs: ``{"TPU": 4}``.

        Raises:
            DeviceError: torch has no TPU here; why.
        """
        return {"TPU": len(_tpus())}


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> tuple[str, ...]:
    """Begin to use this process's TPU; returns the names of the host's: ``("tpu:0", "tpu:1")``.

    A process of torch_tpu has one TPU, or takes all of them. ``torch.manual_seed`` is enough to
    take all: so call this, or make a ``TPUStrategy``, before it.

    Args:
        cluster_resolver: as in tf.distribute; the TPUs are this host's in any case.

    Raises:
        DeviceError: torch has no TPU here; why.
    """
    names = _tpus()
    _take_own(names)
    return names


@public_methods
class TPUStrategy(Strategy):
    """Every TPU of this host holds the whole model and computes its shares of each global batch.

    It works as ``MirroredStrategy`` on accelerators: one process for each TPU, a copy of the
    parameters on each. It begins to use this process's TPU: see ``initialize_tpu_system``.

    Args:
        devices: how many TPUs, their names, such as ``["tpu:0", "tpu:1"]``, or a
            ``TPUClusterResolver``. None is the number of ``lockstep run --devices``, or else all.
        num_shares: see ``MirroredStrategy``.
        engine: moves tensors between TPUs. None and ``"gloo"`` move them through host memory.
        timeout_seconds: longest wait for a replica; a longer one is an error.

    Raises:
        DeviceError: no TPU, and why; TPUs that do not exist, or are named twice.
        OptionError: another invalid argument.
    """

    def __init__(
        self,
        devices: Devices | TPUClusterResolver = None,
        *,
        num_shares: int | None = None,
        engine: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        names = _named(None if isinstance(devices, TPUClusterResolver) else devices)
        self._mirrored = MirroredStrategy(
            names,
            num_shares=num_shares,
            channels_last=False,
            engine=engine,
            timeout_seconds=timeout_seconds,
        )
        self.timeout_seconds = timeout_seconds
        _take_own(names)

    def maker(self, precision: str = "fp32") -> Maker:
        return self._mirrored.maker(precision)

    @property
    def num_replicas_in_sync(self) -> int:
        return self._mirrored.num_replicas_in_sync


def _named(devices: Devices) -> tuple[str, ...]:
    """The names of the TPUs that are asked for.

    Raises:
        DeviceError: these are no TPUs of this host.
    """
    check_devices(devices)
    if isinstance(devices, Sequence) and kind_of(devices[0]) != torch_tpu.KIND:
        raise DeviceError(
            "TPUStrategy trains on TPUs.",
            received=f"devices={list(devices)!r}",
            fix='Use names such as "tpu:0", or MirroredStrategy.',
        )
    _tpus()
    asked = find_devices(os.environ) if devices is None else devices
    return device_names(asked, discover().hosts[0])


def _tpus() -> tuple[str, ...]:
    """The names of this host's TPUs.

    Raises:
        DeviceError: torch has none here; why.
    """
    missing = torch_tpu.missing_part()
    if missing is not None:
        raise DeviceError(missing[0], received="no TPU", fix=f"Run `{missing[1]}`.")
    names = tuple(device.name for device in discover().hosts[0].devices_of(torch_tpu.KIND))
    if not names:
        raise DeviceError(
            "torch_tpu finds no TPU on this host.",
            received="no TPU",
            fix="Run the script on a TPU's own host, or use MirroredStrategy on what there is.",
        )
    return names


def _take_own(names: Sequence[str]) -> None:
    """Begin to use the TPU of this process, which its launcher has numbered."""
    from lockstep.accelerators import take_tpu  # imports torch, which needs what _tpus checks

    place = find_place(os.environ)
    own = 0 if place is None else place.process
    if own < len(names):
        take_tpu(int(names[own].partition(":")[2]))
