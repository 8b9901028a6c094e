"""Combinations of other strategies: replicas of pipelines, or of ranks that divide the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.errors import OptionError, Problems
from lockstep.options import is_count
from lockstep.plan.devices import check_devices
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.makers.sharded import ShardedStages
from lockstep.plan.program.compression import Compression, check_carrier, find_compression
from lockstep.strategies.base import Strategy
from lockstep.strategies.fully_sharded import FullyShardedStrategy, sharded_replicas
from lockstep.strategies.pipeline import StagedStrategy, check_counts
from lockstep.strategies.tensor_parallel import (
    TensorParallelStrategy,
    check_division,
    divide_along,
    tensor_replicas,
)
from lockstep.tracebacks import public_methods

_Given = dict[str, Any]
"""Options by name."""

# Those that need stages, ranks that divide layers, and ranks that divide parameters.
_OF_STAGES = ("pipe", "cuts", "microbatches", "memory_bytes", "compression")
_OF_LAYERS = ("num_tensor_shards", "whole")
_OF_PARAMETERS = ("level", "units")


@public_methods
class HybridStrategy(StagedStrategy):
    """Data parallelism times layer-wise partition, tensor parallelism, or sharding.

    Every stage of the pipeline has replicas, which take turns with the microbatches and sum their
    gradients. ``data`` may differ from stage to stage: ``data=(3, 1)`` has three replicas of the
    first stage (convolutions, for example) and one of the second (dense layers).

    With ``tensor`` each stage, or the whole model without ``pipe`` and ``cuts``, is computed by so
    many processes of one host that divide its layers inside, see ``TensorParallelStrategy``.

    With ``shard``, without stages, each replica is divided among so many devices, which gather its
    parameters among themselves, see ``FullyShardedStrategy``. Devices are numbered group
    by group, so on several hosts with a multiple of ``shard`` devices each, no parameters are
    gathered from another host. Gradients and the optimizer's slots are divided among all devices.
    With stages and ``level="slots"``, ``data`` times ``shard`` replicas of each stage divide the
    optimizer's slots of its parameters.

    Args:
        data: the number of replicas of every stage, or of each stage.
        pipe: the number of stages; None takes it from scopes, cuts or ``data``.
        cuts: as in ``PipelineStrategy``.
        microbatches: of a batch, for each replica.
        schedule: as in ``PipelineStrategy``.
        recompute: as in ``PipelineStrategy``; with ``shard`` as in ``FullyShardedStrategy``.
        memory_bytes: as in ``PipelineStrategy``.
        tensor: the number of processes that divide the layers of a replica, or of each replica of a
            stage.
        shard: the number of devices that divide each replica, or the slots of each stage.
        level: with ``shard``: as in ``FullyShardedStrategy``; None is ``"parameters"``. With stages
            it must be ``"slots"``.
        units: with ``shard``: as in ``FullyShardedStrategy``.
        num_shares: with ``tensor`` or ``shard``, without stages: as in ``MirroredStrategy``.
        num_tensor_shards: with ``tensor``: as in ``TensorParallelStrategy``. Runs with the same
            numbers of both give the same bits with any ``data`` and ``tensor``; with stages, runs
            with the same number, ``data`` and ``microbatches`` with any ``tensor`` and ``pipe``.
        whole: with ``tensor``: as in ``TensorParallelStrategy``.
        split: with ``tensor``, without stages: as in ``TensorParallelStrategy``.
        compression: as in ``MultiWorkerMirroredStrategy``, of gradients between the replicas of a
            stage on several hosts; messages between stages are not compressed.
        devices: as in ``PipelineStrategy``; with ``tensor`` those that divide layers together come
            together, and without stages named ones are of one host.
        engine: as in ``PipelineStrategy``.
        threads_per_device: as in ``PipelineStrategy``.
        timeout_seconds: longest wait for a device; a longer one is an error.

    Raises:
        OptionError: an invalid argument.
    """

    _inner: Strategy | None = None  # makes the Plans, if there are no stages
    _sharded: Mapping[str, int] = {}  # the replicas that divide slots

    def __init__(
        self,
        data: int | Sequence[int] = 1,
        pipe: int | None = None,
        *,
        cuts: Sequence[str] | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        recompute: bool | Sequence[int] | Sequence[str] = False,
        memory_bytes: int | None = None,
        tensor: int | None = None,
        shard: int | None = None,
        level: str | None = None,
        units: Sequence[str | Sequence[str]] | None = None,
        num_shares: int | None = None,
        num_tensor_shards: int | None = None,
        whole: Sequence[str] = (),
        split: str = "layers",
        compression: str | Compression | None = None,
        devices: Sequence[str] | None = None,
        engine: str | None = None,
        threads_per_device: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
        check_devices(devices, counted_by="`data`, `pipe`, `tensor` and `shard`")
        common = {
            "devices": devices,
            "engine": engine,
            "threads_per_device": threads_per_device,
            "timeout_seconds": timeout_seconds,
        }
        given: _Given = {
            "pipe": pipe,
            "cuts": cuts,
            "microbatches": microbatches,
            "schedule": schedule,
            "recompute": recompute,
            "memory_bytes": memory_bytes,
            "tensor": tensor,
            "shard": shard,
            "level": level,
            "units": units,
            "num_shares": num_shares,
            "num_tensor_shards": num_tensor_shards,
            "whole": whole,
            "split": None if split == "layers" else split,
            "compression": compression,
        }
        has_stages = _has_stages(data, pipe, cuts)
        if shard is not None and not has_stages:
            self._divide_parameters(problems, data, given, common)
        elif tensor is not None and not has_stages:
            self._divide_layers(problems, data, given, common)
        else:
            self._make_stages(problems, data, given, common)

    def _divide_parameters(
        self, problems: Problems, data: int | Sequence[int], given: _Given, common: _Given
    ) -> None:
        """Have each replica, without stages, be divided among ranks that gather its parameters."""
        others = (*_OF_STAGES, *_OF_LAYERS, "split", "tensor")
        _check_alone(problems, "shard", _picked(given, *others))
        check_counts(problems, shard=given["shard"])
        replicas = _replicas_of_ranks(problems, "shard", data)
        options = _picked(given, "units", "recompute", "num_shares")
        options["level"] = "parameters" if given["level"] is None else given["level"]
        self._consist_of(sharded_replicas(replicas, given["shard"], **options, **common))

    def _divide_layers(
        self, problems: Problems, data: int | Sequence[int], given: _Given, common: _Given
    ) -> None:
        """Have ranks divide the layers of each replica, without stages."""
        others = (*_OF_STAGES, *_OF_PARAMETERS, "recompute")
        _check_alone(problems, "tensor", _picked(given, *others))
        check_counts(problems, num_shares=given["num_shares"])
        replicas = _replicas_of_ranks(problems, "tensor", data)
        options = {**_picked(given, *_OF_LAYERS, "num_shares"), "split": given["split"] or "layers"}
        self._consist_of(tensor_replicas(replicas, given["tensor"], **options, **common))

    def _make_stages(
        self, problems: Problems, data: int | Sequence[int], given: _Given, common: _Given
    ) -> None:
        """Have replicas of stages, which may divide layers or slots."""
        without = {"units", "split", "num_shares"}
        without |= {"level"} if given["shard"] is None else set()
        without |= {*_OF_LAYERS} if given["tensor"] is None else set()
        if given["shard"] is not None:
            data = self._divide_slots(problems, data, given["shard"], given["level"])
        _check_without_stages(problems, {name: given[name] for name in given if name in without})
        check_division(problems, *(given[name] for name in ("tensor", *_OF_LAYERS)))
        self._compression = find_compression(problems, given["compression"])
        check_carrier(problems, self._compression, common["engine"])
        check_counts(problems, pipe=given["pipe"])
        _check_data(problems, data, given["pipe"], given["schedule"])
        kept = ("cuts", "microbatches", "schedule", "recompute", "memory_bytes", "tensor", "whole")
        self._set_up(
            problems,
            stages=given["pipe"],
            replicas=data,
            num_shards=given["num_tensor_shards"],
            **_picked(given, *kept),
            **common,
        )

    def _divide_slots(
        self, problems: Problems, data: int | Sequence[int], shard: int, level: str | None
    ) -> int:
        """Have replicas of stages divide slots; returns how many there are of each stage."""
        if level != "slots":
            problems.add(
                "Replicas of a stage divide the optimizer's slots only: each runs through its "
                "microbatches in a time of its own, with all of the stage's parameters.",
                received=f"shard={shard} and level={level!r} with stages",
                fix='Use level="slots", or leave `pipe` and `cuts` out.',
            )
        check_counts(problems, shard=shard)
        replicas = _replicas_of_ranks(problems, "shard", data)
        self._sharded = {"data": replicas, "shard": shard}
        return replicas * shard

    def _consist_of(self, inner: FullyShardedStrategy | TensorParallelStrategy) -> None:
        """Train as a strategy without stages does."""
        self._inner = inner
        self.reach = inner.reach
        self.engine = inner.engine
        self.threads_per_device = inner.threads_per_device
        self.timeout_seconds = inner.timeout_seconds

    def maker(self, precision: str = "fp32") -> Maker:
        if self._inner is not None:
            return self._inner.maker(precision)
        maker = super().maker(precision)
        return ShardedStages(maker=maker, **self._sharded) if self._sharded else maker

    @property
    def num_replicas_in_sync(self) -> int:
        """Parts of a batch that are trained at once; see ``FullyShardedStrategy``."""
        inner = self._inner
        return super().num_replicas_in_sync if inner is None else inner.num_replicas_in_sync


def divided_by_hand(
    data: int, tensor: int, dims: Callable[[Any], Mapping[str, int]], **options: Any
) -> TensorParallelStrategy | HybridStrategy:
    """A strategy that divides certain parameters, along certain dims.

    Args:
        data: how many replicas.
        tensor: processes of each.
        dims: see ``DivisionOptions``.
        options: of the strategy.
    """
    if data == 1:
        alone = TensorParallelStrategy(tensor, **options)
        divide_along(alone, dims)
        return alone
    made = HybridStrategy(data, tensor=tensor, **options)
    assert isinstance(made._inner, TensorParallelStrategy)
    divide_along(made._inner, dims)
    return made


def _picked(options: _Given, *names: str) -> _Given:
    return {name: options[name] for name in names}


_ALONE = {
    "tensor": "`tensor` without `pipe` or `cuts` divides layers within a host, without stages.",
    "shard": "`shard` without `pipe` or `cuts` divides parameters, and no layers inside.",
}


def _has_stages(data: object, pipe: int | None, cuts: Sequence[str] | None) -> bool:
    return pipe is not None or cuts is not None or isinstance(data, Sequence)


def _given(options: Mapping[str, object]) -> str:
    return ", ".join(name for name, value in options.items() if value not in (None, False, ()))


def _check_alone(problems: Problems, name: str, others: Mapping[str, object]) -> None:
    """Note options that do not go with ``tensor`` or ``shard``."""
    if given := _given(others):
        problems.add(
            _ALONE[name],
            received=f"{name} with {given}",
            fix=f"Leave these out, or leave `{name}` out.",
        )


def _replicas_of_ranks(problems: Problems, name: str, data: int | Sequence[int]) -> int:
    """The number of replicas without stages.

    Raises:
        OptionError: ``data`` is no such number, or a problem was noted before.
    """
    number = data if isinstance(data, int) and is_count(data) else 0
    if not number:
        problems.add(
            f"With `{name}`, `data` must be a number of replicas.",
            received=f"data={data!r}",
            fix="Use data=2, for example.",
        )
    problems.raise_if_any(OptionError)
    return number


def _check_without_stages(problems: Problems, options: Mapping[str, object]) -> None:
    """Note options that go with ``tensor`` or ``shard`` only."""
    if given := _given(options):
        problems.add(
            "`level` needs `shard`, `units` needs it without stages, `num_tensor_shards` and "
            "`whole` need `tensor`, `split` needs it without stages, and `num_shares` needs "
            "that or `shard`.",
            received=given,
            fix="Leave these out, or pass what they need.",
        )


def _check_data(problems: Problems, data: object, pipe: object, schedule: object) -> None:
    is_list = isinstance(data, Sequence) and not isinstance(data, str)
    counts = list(data) if is_list else [data]  # type: ignore[call-overload]
    if not counts or not all(is_count(count) for count in counts):
        problems.add(
            "`data` must be a number of replicas, or one for each stage.",
            received=f"data={data!r}",
            fix="Use data=2, for example.",
        )
    elif is_list and is_count(pipe) and len(counts) != pipe:
        problems.add(
            "`data` must have a number of replicas for each stage.",
            received=f"data={data!r} with pipe={pipe}",
            fix=f"Give {pipe} numbers, or leave `pipe` out.",
        )
    elif is_list and schedule == "interleaved":
        problems.add(
            "With a number of replicas for each stage, a device has one stage, not several.",
            received=f"data={data!r} with schedule='interleaved'",
            fix="Use '1f1b'.",
        )
