"""Products of the other strategies: so far replicas of a pipeline."""

from collections.abc import Sequence

from lockstep.errors import OptionError, Problems
from lockstep.plan.makers import Maker
from lockstep.plan.pipelines import Pipelined
from lockstep.strategies.base import Strategy, check_timeout, is_count
from lockstep.strategies.pipeline import check_counts, check_cuts, check_schedule


class HybridStrategy(Strategy):
    """Data parallelism times layer-wise partition.

    Every stage of the pipeline has replicas, which take turns with the microbatches and add up
    their gradients. ``data`` may differ from stage to stage: ``data=(3, 1)`` has three replicas of
    the first stage (convolutions, say) and one of the second (the dense layers).

    Args:
        data: replicas of every stage, or of each stage.
        pipe: stages; None is as many as scopes, cuts or ``data`` say.
        cuts: as in ``PipelineStrategy``.
        microbatches: of a batch, for each replica.
        schedule: as in ``PipelineStrategy``.
        recompute: as in ``PipelineStrategy``.
        memory_bytes: as in ``PipelineStrategy``.
        timeout_seconds: longest wait for a device; what hangs longer is reported.

    Raises:
        OptionError: an argument that cannot be.
    """

    def __init__(
        self,
        data: int | Sequence[int] = 1,
        pipe: int | None = None,
        *,
        cuts: Sequence[str] | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        recompute: bool = False,
        memory_bytes: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
        check_counts(problems, pipe=pipe, microbatches=microbatches, memory_bytes=memory_bytes)
        _check_data(problems, data, pipe, schedule)
        check_cuts(problems, cuts)
        check_schedule(problems, schedule)
        check_timeout(problems, timeout_seconds)
        problems.raise_if_any(OptionError)
        self.timeout_seconds = timeout_seconds
        self.data = data if isinstance(data, int) else tuple(data)
        self.pipe = pipe
        self.cuts = None if cuts is None else tuple(cuts)
        self.microbatches = microbatches
        self.schedule = schedule
        self.recompute = bool(recompute)
        self.memory_bytes = memory_bytes

    def maker(self, precision: str = "fp32") -> Maker:
        return Pipelined(
            stages=self.pipe,
            cuts=self.cuts,
            microbatches=self.microbatches,
            schedule=self.schedule,
            replicas=self.data,
            recompute=self.recompute,
            memory_bytes=self.memory_bytes,
            precision=precision,
        )

    @property
    def num_replicas_in_sync(self) -> int:
        return self.data if isinstance(self.data, int) else max(self.data)


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
            "Every stage needs its number of replicas.",
            received=f"data={data!r} with pipe={pipe}",
            fix=f"Give {pipe} numbers, or leave `pipe` out.",
        )
    elif is_list and schedule == "interleaved":
        problems.add(
            "Stages with their own numbers of replicas have a device for each.",
            received=f"data={data!r} with schedule='interleaved'",
            fix="Use '1f1b'.",
        )
