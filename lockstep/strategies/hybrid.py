"""Combinations of the other strategies: replicas of a pipeline, or of ranks that divide layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.errors import OptionError, Problems
from lockstep.options import is_count
from lockstep.plan.engines import check_leave
from lockstep.plan.program.compression import Compression, check_carrier, find_compression
from lockstep.strategies.pipeline import StagedStrategy, check_counts
from lockstep.strategies.tensor_parallel import TensorParallelStrategy, check_number
from lockstep.tracebacks import public_methods


@public_methods
class HybridStrategy(StagedStrategy):
    """Data parallelism times layer-wise partition, or times tensor parallelism.

    Every stage of the pipeline has replicas, which take turns with the microbatches and sum their
    gradients. ``data`` may differ from stage to stage: ``data=(3, 1)`` has three replicas of the
    first stage (convolutions, for example) and one of the second (dense layers).

    With ``tensor`` there are no stages: each replica consists of processes of one host that divide
    its layers inside, see ``TensorParallelStrategy``. Hosts have whole replicas.

    Args:
        data: the number of replicas of every stage, or of each stage.
        pipe: the number of stages; None takes it from scopes, cuts or ``data``.
        cuts: as in ``PipelineStrategy``.
        microbatches: of a batch, for each replica.
        schedule: as in ``PipelineStrategy``.
        recompute: as in ``PipelineStrategy``.
        memory_bytes: as in ``PipelineStrategy``.
        tensor: the number of processes that divide the layers of a replica.
        num_shares: with ``tensor``: as in ``MirroredStrategy``.
        num_tensor_shards: with ``tensor``: as in ``TensorParallelStrategy``. Runs with the same
            numbers of both give the same bits with any ``data`` and ``tensor``.
        whole: with ``tensor``: as in ``TensorParallelStrategy``.
        compression: as in ``MultiWorkerMirroredStrategy``, of gradients between the replicas of a
            stage on several hosts; messages between stages are not compressed.
        devices: as in ``PipelineStrategy``; with ``tensor`` those of a replica come together, and
            named ones are of one host.
        engine: as in ``PipelineStrategy``.
        timeout_seconds: longest wait for a device; a longer one is an error.

    Raises:
        OptionError: an invalid argument.
    """

    def __init__(
        self,
        data: int | Sequence[int] = 1,
        pipe: int | None = None,
        *,
        cuts: Sequence[str] | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        recompute: bool | Sequence[int] = False,
        memory_bytes: int | None = None,
        tensor: int | None = None,
        num_shares: int | None = None,
        num_tensor_shards: int | None = None,
        whole: Sequence[str] = (),
        compression: str | Compression | None = None,
        devices: Sequence[str] | None = None,
        engine: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
        if tensor is not None:
            others = {
                "pipe": pipe,
                "cuts": cuts,
                "microbatches": microbatches,
                "recompute": recompute,
                "memory_bytes": memory_bytes,
                "compression": compression,
            }
            _check_alone(problems, others)
            check_counts(problems, num_shares=num_shares)
            replicas = _replicas_of_ranks(problems, data)
            problems.raise_if_any(OptionError)
            own = TensorParallelStrategy(
                tensor,
                num_tensor_shards=num_tensor_shards,
                whole=whole,
                devices=None if devices is None else devices[: len(devices) // replicas],
                engine=engine,
                timeout_seconds=timeout_seconds,
            )
            self._divide_layers(own, replicas, num_shares, devices)
            return
        _check_of_tensor(problems, num_shares, num_tensor_shards, whole)
        self._compression = find_compression(problems, compression)
        check_carrier(problems, self._compression, engine)
        check_counts(problems, pipe=pipe)
        _check_data(problems, data, pipe, schedule)
        self._set_up(
            problems,
            stages=pipe,
            cuts=cuts,
            microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
            memory_bytes=memory_bytes,
            devices=devices,
            engine=engine,
            timeout_seconds=timeout_seconds,
            replicas=data,
        )

    def _divide_layers(
        self,
        own: TensorParallelStrategy,
        data: int,
        num_shares: int | None,
        devices: Sequence[str] | None,
    ) -> None:
        """Replicas of processes that divide layers inside."""
        if num_shares is not None and num_shares < data:
            raise OptionError(
                "Every replica needs a share of the batch.",
                received=f"num_shares={num_shares} with {data} replicas",
                fix=f"Use num_shares >= {data}, or fewer replicas.",
            )
        if devices is not None:
            check_leave(devices, own.engine)
            check_number(devices, own.degree * data)
            own.devices = tuple(devices)
        self.reach = "all hosts" if devices is None else "one host"
        self.engine = own.engine
        self.timeout_seconds = own.timeout_seconds
        self._maker = replace(own.tensor_maker(), replicas=data, num_shares=num_shares)


def _check_alone(problems: Problems, others: Mapping[str, object]) -> None:
    """Note options that go with stages only."""
    given = [name for name, value in others.items() if value not in (None, False)]
    if given:
        problems.add(
            "`tensor` divides layers within a host, without stages.",
            received=f"tensor with {', '.join(given)}",
            fix="Leave these out, or leave `tensor` out.",
        )


def _replicas_of_ranks(problems: Problems, data: int | Sequence[int]) -> int:
    """The number of replicas without stages; 1 where a problem was noted."""
    if isinstance(data, int) and is_count(data):
        return data
    problems.add(
        "With `tensor`, `data` must be a number of replicas.",
        received=f"data={data!r}",
        fix="Use data=2, for example.",
    )
    return 1


def _check_of_tensor(
    problems: Problems, num_shares: object, num_tensor_shards: object, whole: Sequence[str]
) -> None:
    """Note options that go with ``tensor`` only."""
    given = {"num_shares": num_shares, "num_tensor_shards": num_tensor_shards, "whole": whole}
    names = [name for name, value in given.items() if value not in (None, ())]
    if names:
        problems.add(
            "`num_shares`, `num_tensor_shards` and `whole` need layers that are divided inside.",
            received=f"{', '.join(names)} without `tensor`",
            fix="Leave these out, or pass `tensor`.",
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
