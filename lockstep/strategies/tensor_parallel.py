"""Tensor parallelism within a host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.cluster.devices import discover
from lockstep.errors import OptionError, Problems
from lockstep.options import check_count, check_timeout, is_count
from lockstep.plan.devices import check_devices, device_names, is_cpu
from lockstep.plan.engines import backend_for, check_engine, check_leave, over
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.makers.sharded import FullySharded
from lockstep.plan.makers.tensor import TensorParallel
from lockstep.plan.makers.threaded import check_threads, threaded
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
        split: "layers", or "time": layers are whole, and sequences are divided. Each process has
            its part of the activations of shape (samples, time, features).
        devices: names of the processes' devices, such as ``["cuda:0", "cuda:1"]``; None is
            accelerators if there are any, else cores.
        engine: moves tensors between processes, see ``MirroredStrategy``.
        threads_per_device: see ``MirroredStrategy``.
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
        split: str = "layers",
        devices: Sequence[str] | None = None,
        engine: str | None = None,
        threads_per_device: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
        _check_split(problems, split, whole)
        check_division(problems, degree, num_tensor_shards, whole)
        check_engine(problems, engine)
        check_threads(problems, threads_per_device)
        check_timeout(problems, timeout_seconds)
        problems.raise_if_any(OptionError)
        check_devices(devices, counted_by="`degree`")
        if devices is not None:
            check_leave(devices, engine)
            check_number(devices, degree)
        names = device_names(devices or degree, discover().hosts[0])
        backend_for(engine, names)
        self._shares_memory = engine is None and is_cpu(names)
        self._maker = TensorParallel(
            degree=len(names),
            devices=None if devices is None else tuple(devices),
            num_shards=num_tensor_shards,
            whole=tuple(whole),
            split=split,
        )
        self.degree = len(names)
        self.engine = engine
        self.threads_per_device = threads_per_device
        self.timeout_seconds = timeout_seconds
        check_division(problems, self.degree, num_tensor_shards)
        problems.raise_if_any(OptionError)

    def maker(self, precision: str = "fp32") -> Maker:
        maker = over(self.engine, replace(self._maker, precision=precision))
        maker = threaded(self.threads_per_device, maker)
        if self._shares_memory:
            return maker
        # Ranks keep only their part of the parameters.
        return FullySharded(maker=maker, level="parameters", units=None)

    @property
    def num_replicas_in_sync(self) -> int:
        return self._maker.most_replicas


def tensor_replicas(
    data: int,
    tensor: int,
    *,
    num_shares: int | None,
    devices: Sequence[str] | None,
    **options: Any,
) -> TensorParallelStrategy:
    """Replicas of processes that divide layers inside.

    Args:
        data: how many replicas.
        tensor: processes of each.
        num_shares: of a batch; None is one for each replica.
        devices: names of all, those of a replica together; None as in ``TensorParallelStrategy``.
        options: see ``TensorParallelStrategy``.

    Raises:
        DeviceError: see ``TensorParallelStrategy``.
        OptionError: likewise; or fewer shares than replicas.
    """
    first = None if devices is None else devices[: len(devices) // data]
    made = TensorParallelStrategy(tensor, devices=first, **options)
    if num_shares is not None and num_shares < data:
        raise OptionError(
            "Every replica needs a share of the batch.",
            received=f"num_shares={num_shares} with {data} replicas",
            fix=f"Use num_shares >= {data}, or fewer replicas.",
        )
    made._maker = replace(made._maker, replicas=data, num_shares=num_shares)
    if devices is None:
        made.reach = "all hosts"
        return made
    check_leave(devices, made.engine)
    check_number(devices, made.degree * data)
    made._maker = replace(made._maker, devices=tuple(devices))
    return made


def divide_along(
    strategy: TensorParallelStrategy, dims: Callable[[Any], Mapping[str, int]]
) -> None:
    """Have a strategy divide certain parameters only; see ``DivisionOptions.dims``."""
    strategy._maker = replace(strategy._maker, dims=dims)


def check_division(
    problems: Problems, degree: int | None, num_shards: int | None, whole: Sequence[str] = ()
) -> None:
    """Note wrong options of layers that are divided inside; see ``TensorParallelStrategy``."""
    check_count("degree", degree, problems, optional=True)
    check_count("num_tensor_shards", num_shards, problems, optional=True)
    if isinstance(whole, str) or not all(isinstance(name, str) for name in whole):
        problems.add(
            "`whole` must be names of modules.",
            received=f"whole={whole!r}",
            fix='Use whole=["blocks.0.mlp"], for example.',
        )
    if is_count(degree) and is_count(num_shards) and num_shards < degree:
        problems.add(
            "Every process needs a part of each layer.",
            received=f"num_tensor_shards={num_shards} with degree {degree}",
            fix=f"Use num_tensor_shards >= {degree}, or a smaller degree.",
        )


def _check_split(problems: Problems, split: str, whole: Sequence[str]) -> None:
    if split not in ("layers", "time"):
        problems.add(
            '`split` must be "layers" or "time".',
            received=f"split={split!r}",
            fix="Leave it out, or use split='time'.",
        )
    elif split == "time" and whole:
        problems.add(
            "With sequences divided, all layers are whole.",
            received=f"split='time' and whole={whole!r}",
            fix="Leave `whole` out.",
        )


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
