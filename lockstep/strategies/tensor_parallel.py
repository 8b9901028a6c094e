"""Tensor parallelism within a host."""

from collections.abc import Sequence

from lockstep.cluster.devices import discover
from lockstep.errors import OptionError, Problems
from lockstep.options import check_count, check_timeout
from lockstep.plan.devices import check_devices, device_names, is_cpu
from lockstep.plan.engines import backend_for, check_engine, check_leave, over
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.makers.sharded import FullySharded
from lockstep.plan.makers.tensor import TensorParallel
from lockstep.strategies.base import Strategy
from lockstep.tracebacks import public_methods


@public_methods
class TensorParallelStrategy(Strategy):
    """Layers are divided inside: each process computes its part of every product.

    All processes run the model on the same batch. The model stays as it is, and so do its
    Parameters, of which processes on cores share one copy. How the layers are divided follows from
    how the model uses them, and ``print(trainer.plan)`` shows it.

    Args:
        degree: how many processes; None is one per accelerator, or else per usable core, at most 8.
        num_tensor_shards: parts into which each layer is divided; None is one per process. Runs
            with the same number give the same bits with any degree.
        whole: names of modules whose layers are not divided.
        devices: names of the processes' devices, such as ``["cuda:0", "cuda:1"]``; None is
            accelerators if there are any, else cores.
        engine: moves tensors between processes, see ``MirroredStrategy``.
        timeout_seconds: longest wait for a process; a longer one is an error.

    Raises:
        DeviceError: a degree above what this host can hold, or devices that it has not.
        OptionError: another invalid argument.
    """

    def __init__(
        self,
        degree: int | None = None,
        *,
        num_tensor_shards: int | None = None,
        whole: Sequence[str] = (),
        devices: Sequence[str] | None = None,
        engine: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
        check_count("degree", degree, problems, optional=True)
        check_count("num_tensor_shards", num_tensor_shards, problems, optional=True)
        if isinstance(whole, str) or not all(isinstance(name, str) for name in whole):
            problems.add(
                "`whole` must be names of modules.",
                received=f"whole={whole!r}",
                fix='Use whole=["blocks.0.mlp"], for example.',
            )
        check_engine(problems, engine)
        check_timeout(problems, timeout_seconds)
        problems.raise_if_any(OptionError)
        check_devices(devices)
        if devices is not None:
            check_leave(devices, engine)
            check_number(devices, degree)
        names = device_names(devices or degree, discover().hosts[0])
        backend_for(engine, names)
        self._shares_memory = engine is None and is_cpu(names)
        self.degree = len(names)
        self.devices = None if devices is None else tuple(devices)
        self.engine = engine
        self.num_tensor_shards = num_tensor_shards
        self.whole = tuple(whole)
        self.timeout_seconds = timeout_seconds
        if num_tensor_shards is not None and num_tensor_shards < self.degree:
            raise OptionError(
                "Every process needs a part of each layer.",
                received=f"num_tensor_shards={num_tensor_shards} with degree {self.degree}",
                fix=f"Use num_tensor_shards >= {self.degree}, or a smaller degree.",
            )

    def maker(self, precision: str = "fp32") -> Maker:
        return self.placed(self.tensor_maker(precision))

    def placed(self, maker: Maker) -> Maker:
        """A maker whose ranks, if they share no memory, keep only their part of the parameters."""
        maker = over(self.engine, maker)
        if self._shares_memory:
            return maker
        return FullySharded(maker=maker, level="parameters", units=None)

    def tensor_maker(self, precision: str = "fp32") -> TensorParallel:
        """The maker, to be combined with others."""
        return TensorParallel(
            degree=self.degree,
            devices=self.devices,
            num_shards=self.num_tensor_shards,
            whole=self.whole,
            precision=precision,
        )

    @property
    def num_replicas_in_sync(self) -> int:
        return 1


def check_number(devices: Sequence[str], num_ranks: int | None) -> None:
    """Check that there is a device for each rank; None is as many as there are.

    Raises:
        OptionError: there is not.
    """
    if num_ranks not in (None, len(devices)):
        raise OptionError(
            "Each process needs a device.",
            received=f"{len(devices)} devices for {num_ranks} processes",
            fix=f"Name {num_ranks}, or leave `devices` out.",
        )
