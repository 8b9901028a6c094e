"""Pipeline parallelism: the model is cut into consecutive stages on several devices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from lockstep.cluster.place import Reach
from lockstep.errors import OptionError, Problems
from lockstep.options import check_choice, check_count, check_timeout
from lockstep.plan.devices import check_devices
from lockstep.plan.engines import check_engine, check_leave, over
from lockstep.plan.makers.compressed import compressed
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.makers.threaded import check_threads, threaded
from lockstep.plan.pipeline.pipelines import Pipelined
from lockstep.plan.pipeline.schedules import SCHEDULES
from lockstep.plan.program.compression import Compression
from lockstep.strategies.base import Strategy
from lockstep.tracebacks import public_methods


@public_methods
class StagedStrategy(Strategy):
    """The common part of strategies with stages: their options, and the maker."""

    reach: Reach = "all hosts"
    _maker: Pipelined
    _compression: Compression | None = None

    def _set_up(
        self,
        problems: Problems,
        *,
        engine: str | None,
        threads_per_device: int | None,
        timeout_seconds: float,
        **options: Any,
    ) -> None:
        """Check options, which ``PipelineStrategy`` explains, and make the maker.

        Raises:
            OptionError: an invalid option, or a problem that was noted before.
        """
        devices = options["devices"]
        check_counts(problems, **{name: options[name] for name in ("microbatches", "memory_bytes")})
        check_cuts(problems, options["cuts"])
        check_choice("schedule", options["schedule"], SCHEDULES, problems, fix="Use '1f1b'.")
        _check_recompute(problems, options["recompute"])
        check_timeout(problems, timeout_seconds)
        check_engine(problems, engine)
        check_threads(problems, threads_per_device)
        problems.raise_if_any(OptionError)
        check_devices(devices, counted_by="`stages`")
        if devices is not None:
            check_leave(devices, engine)
        lists = {name: tuple(one) for name, one in options.items() if _is_list(one)}
        self._maker = Pipelined(**{**options, **lists})
        self.engine = engine
        self.threads_per_device = threads_per_device
        self.timeout_seconds = timeout_seconds

    def maker(self, precision: str = "fp32") -> Maker:
        maker = compressed(self._compression, replace(self._maker, precision=precision))
        return threaded(self.threads_per_device, over(self.engine, maker))

    @property
    def num_replicas_in_sync(self) -> int:
        return self._maker.most_replicas


@public_methods
class PipelineStrategy(StagedStrategy):
    """The model's layers are divided among devices; microbatches pass through them in turn.

    The model's code is not changed. It is cut at its ``lockstep.device`` scopes, or at ``cuts``, or
    so that the slowest stage is as fast as possible.

    Args:
        stages: number of devices; None takes it from scopes or cuts, or else uses as many as make
            training faster. A model with fewer layers has fewer stages, which the plan's notes say.
        cuts: names of modules, such as ``"decoder.0"``, at which the second and later stages begin.
        microbatches: parts of each batch that are in the pipeline at once; None is four per stage,
            or one if the model has one stage.
        schedule: ``"1f1b"``; ``"gpipe"``; ``"interleaved"``, in which every device has several
            stages; ``"zb-h1"`` and ``"zb-h2"``, which delay the gradients of weights to idle times.
        recompute: True to compute activations again in backward instead of keeping them; a list of
            stages does so only in these.
        memory_bytes: memory of a device, which cuts respect.
        devices: names of each host's, such as ``["cuda:0", "cuda:1"]``, one for each rank; None is
            accelerators if there are any, else cores.
        engine: moves tensors between devices. None is shared memory, and Lockstep's own channels
            between hosts; ``"gloo"`` is torch.distributed. On accelerators see
            ``MirroredStrategy``.
        threads_per_device: see ``MirroredStrategy``; cuts are made for one thread.
        timeout_seconds: longest wait for a device; a longer one is an error.

    Raises:
        OptionError: an invalid argument.
    """

    def __init__(
        self,
        stages: int | None = None,
        cuts: Sequence[str] | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        *,
        recompute: bool | Sequence[int] = False,
        memory_bytes: int | None = None,
        devices: Sequence[str] | None = None,
        engine: str | None = None,
        threads_per_device: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
        check_counts(problems, stages=stages)
        self._set_up(
            problems,
            stages=stages,
            cuts=cuts,
            microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
            memory_bytes=memory_bytes,
            devices=devices,
            engine=engine,
            threads_per_device=threads_per_device,
            timeout_seconds=timeout_seconds,
        )


def check_counts(problems: Problems, **counts: int | None) -> None:
    """Note numbers that are neither None nor an integer of at least 1."""
    for name, value in counts.items():
        fix = "Leave it out to have it chosen."
        check_count(name, value, problems, optional=True, fix=fix)


def check_cuts(problems: Problems, cuts: object) -> None:
    """Note cuts that are no list of names."""
    if cuts is None:
        return
    if not _is_list(cuts) or not all(isinstance(name, str) for name in cuts):
        problems.add(
            "`cuts` must be a list of names of modules.",
            received=f"cuts={cuts!r}",
            fix='Use cuts=["decoder.0"], for example.',
        )


def _check_recompute(problems: Problems, recompute: object) -> None:
    """Note a value that is neither a bool nor a list of stages."""
    are_stages = _is_list(recompute) and all(type(one) is int for one in recompute)
    if not (are_stages or isinstance(recompute, bool)):
        problems.add(
            "`recompute` must be True, False, or a list of stages.",
            received=f"recompute={recompute!r}",
            fix="Use recompute=[0] for the first stage, for example.",
        )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
