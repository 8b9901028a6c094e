"""Combinations of the other strategies: so far replicas of a pipeline."""

from collections.abc import Sequence

from lockstep.errors import Problems
from lockstep.options import is_count
from lockstep.plan.program.compression import Compression, check_carrier, find_compression
from lockstep.strategies.pipeline import StagedStrategy, check_counts
from lockstep.tracebacks import public_methods


@public_methods
class HybridStrategy(StagedStrategy):
    """Data parallelism times layer-wise partition.

    Every stage of the pipeline has replicas, which take turns with the microbatches and sum their
    gradients. ``data`` may differ from stage to stage: ``data=(3, 1)`` has three replicas of the
    first stage (convolutions, for example) and one of the second (dense layers).

    Args:
        data: the number of replicas of every stage, or of each stage.
        pipe: the number of stages; None takes it from scopes, cuts or ``data``.
        cuts: as in ``PipelineStrategy``.
        microbatches: of a batch, for each replica.
        schedule: as in ``PipelineStrategy``.
        recompute: as in ``PipelineStrategy``.
        memory_bytes: as in ``PipelineStrategy``.
        compression: as in ``MultiWorkerMirroredStrategy``, of gradients between the replicas of a
            stage on several hosts; messages between stages are not compressed.
        devices: as in ``PipelineStrategy``.
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
        compression: str | Compression | None = None,
        devices: Sequence[str] | None = None,
        engine: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
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
