"""Synchronous data parallelism over several hosts."""

from dataclasses import replace

from lockstep.cluster.place import Reach
from lockstep.errors import DeviceError, OptionError, Problems
from lockstep.options import check_positive, check_timeout, is_count
from lockstep.plan.engines import check_engine, over
from lockstep.plan.makers.compressed import compressed
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.makers.many_hosts import DEFAULT_GBIT_PER_SECOND, MirroredHosts
from lockstep.plan.makers.threaded import check_threads, threaded
from lockstep.plan.program.compression import Compression, check_carrier, find_compression
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import check_format, check_shares
from lockstep.tracebacks import public_methods


@public_methods
class MultiWorkerMirroredStrategy(Strategy):
    """Every device of every host holds the whole model and computes its shares of each batch.

    Each host runs the same script, started by ``TF_CONFIG``, torchrun, srun or ``lockstep run``.
    Within a host it works as ``MirroredStrategy``; between hosts each device exchanges its slice. A
    script without a launcher has one host.

    Args:
        devices_per_host: how many on each host; None is the launcher's number, else all
            accelerators, else one CPU replica per usable core, at most 8.
        num_shares: parts into which each global batch is divided; None is one per replica.
        channels_last: see ``MirroredStrategy``.
        network_gbit_per_second: how fast a host sends to another (``lockstep doctor`` measures
            it). Over a slow network large dense layers exchange activations instead of gradients.
        compression: of the gradients that hosts send each other, for slow networks: ``"bf16"``,
            ``"int8"``, a ``PowerSGD`` or a ``TopK``. The compression error of a step is added to
            the gradients of the next. The result is no longer that of one device, but the same on
            all hosts.
        engine: moves tensors between replicas. None is shared memory within a host, and Lockstep's
            own channels between hosts; ``"gloo"`` is torch.distributed, with a copy of the
            parameters for each replica. On accelerators see ``MirroredStrategy``.
        threads_per_device: see ``MirroredStrategy``.
        timeout_seconds: longest wait for another host or a replica; a longer one is an error that
            names it.

    Raises:
        DeviceError: fewer than one device.
        OptionError: another invalid argument.
    """

    reach: Reach = "all hosts"

    def __init__(
        self,
        devices_per_host: int | None = None,
        *,
        num_shares: int | None = None,
        channels_last: bool | None = None,
        network_gbit_per_second: float = DEFAULT_GBIT_PER_SECOND,
        compression: str | Compression | None = None,
        engine: str | None = None,
        threads_per_device: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        check_number("devices_per_host", devices_per_host)
        problems = Problems()
        check_shares(problems, num_shares)
        check_format(problems, channels_last)
        fix = "Use 1 for Gigabit Ethernet, 10 for 10 Gigabit Ethernet."
        name, speed = "network_gbit_per_second", network_gbit_per_second
        check_positive(name, speed, problems, fix=fix, may_be_infinite=True)
        check_engine(problems, engine)
        check_threads(problems, threads_per_device)
        self._compression = find_compression(problems, compression)
        check_carrier(problems, self._compression, engine)
        check_timeout(problems, timeout_seconds)
        problems.raise_if_any(OptionError)
        self.engine = engine
        self.threads_per_device = threads_per_device
        self.timeout_seconds = timeout_seconds
        self._maker = MirroredHosts(
            devices_per_host=devices_per_host,
            num_shares=num_shares,
            channels_last=channels_last,
            gbit_per_second=network_gbit_per_second,
        )

    def maker(self, precision: str = "fp32") -> Maker:
        maker = compressed(self._compression, replace(self._maker, precision=precision))
        maker = over(self.engine, maker, num_shares=self._maker.num_shares)
        return threaded(self.threads_per_device, maker)

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all hosts. This communicates with the other hosts, so all must ask.

        Raises:
            OptionError: this is not the first process of the host.
        """
        return num_replicas(self._maker, self.timeout_seconds)


def check_number(name: str, devices: object) -> None:
    """Check a number of devices of each host, or None.

    Raises:
        DeviceError: it is neither.
    """
    if devices is not None and not is_count(devices):
        raise DeviceError(
            f"`{name}` must be a number of devices, at least 1.",
            received=f"{name}={devices!r}",
            fix=f"Use {name}=2 for two CPU replicas on each host, or leave it out.",
        )


def num_replicas(maker: MirroredHosts, timeout_seconds: float, *, on_cores: bool = False) -> int:
    """Replicas of all hosts; see ``num_replicas_in_sync``."""
    from lockstep.train.multihost.discovery import find_cluster, find_num_ranks

    num_ranks = find_num_ranks()
    if num_ranks is not None:
        return num_ranks
    cluster = find_cluster(timeout_seconds)
    return sum(maker.replicas(cluster.cores if on_cores else cluster))
