"""Local SGD: replicas step independently and average their weights now and then."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.cluster.devices import discover
from lockstep.cluster.environment import find_devices, find_place
from lockstep.cluster.place import Reach
from lockstep.errors import DeviceError, OptionError, Problems
from lockstep.options import check_choice, check_flag, check_timeout
from lockstep.plan.averaging import AveragedUpdate, Every, Nesterov, is_every
from lockstep.plan.devices import Devices, check_devices, device_names
from lockstep.plan.engines import backend_for, check_engine, check_leave, over
from lockstep.plan.makers.compressed import compressed
from lockstep.plan.makers.data_parallel import LocalSteps, Maker, Mirrored
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.pipeline.pipelines import Pipelined, PipelinesOnHosts
from lockstep.plan.pipeline.schedules import SCHEDULES
from lockstep.plan.program.compression import Compression, find_compression
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import check_format
from lockstep.strategies.multi_worker import check_number, num_replicas
from lockstep.strategies.pipeline import check_counts, check_cuts
from lockstep.tracebacks import public_methods


@public_methods
class LocalSGDStrategy(Strategy):
    """Every device trains a model of its own, and now and then they average their weights.

    Each trains on its share of every batch, and between averages none waits for another. In an
    average, replicas count by how much they have trained on since the last one. The result differs
    from that of one device, except with ``every=1`` and plain SGD. Stich, Local SGD Converges Fast
    and Communicates Little (2018).

    With ``stages`` a replica is a pipeline of as many devices, as in ``PipelineStrategy``.

    On several hosts each runs the same script, as under ``MultiWorkerMirroredStrategy``; they
    exchange only averages.

    Args:
        every: steps from one average to the next, or ``"epoch"``. The end of an epoch always
            averages.
        devices: number of CPU replicas on each host; None is the launcher's number, or else one per
            usable core, at most 8. With ``stages`` it is the number of all ranks of pipelines. Or
            names of accelerators of one host, such as ``["cuda:0", "cuda:1"]``.
        stages: ranks of a pipeline; None is replicas of one device.
        cuts: as in ``PipelineStrategy``.
        microbatches: likewise, of each replica's part of a batch.
        schedule: likewise.
        outer: the optimizer that steps on the average; None takes the average itself,
            ``Nesterov()`` is DiLoCo.
        average_optimizer: True to average the optimizer's slots, too. Otherwise each replica keeps
            its own during ``fit``; afterwards the optimizer has those of the first.
        compression: of the changes that hosts send each other: see
            ``MultiWorkerMirroredStrategy``.
        channels_last: see ``MirroredStrategy``.
        engine: moves the averages of accelerators; see ``MirroredStrategy``.
        timeout_seconds: longest wait for a replica; a longer one is an error. With few averages it
            limits by how long one replica may be behind.

    Raises:
        DeviceError: fewer than one device, or more than this host can hold.
        OptionError: another invalid argument.
    """

    reach: Reach = "all hosts"

    def __init__(
        self,
        every: Every,
        devices: Devices = None,
        *,
        stages: int | None = None,
        cuts: Sequence[str] | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        outer: Nesterov | None = None,
        average_optimizer: bool = False,
        compression: str | Compression | None = None,
        channels_last: bool | None = None,
        engine: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
        check_engine(problems, engine)
        _check_averaging(problems, every, outer, average_optimizer)
        check_format(problems, channels_last)
        check_timeout(problems, timeout_seconds)
        _check_stages(problems, stages, cuts=cuts, microbatches=microbatches, schedule=schedule)
        _check_whole(problems, stages, average_optimizer, channels_last)
        self._compression = find_compression(problems, compression)
        _check_accelerators(problems, devices, engine, stages=stages, compression=compression)
        problems.raise_if_any(OptionError)
        self.stages = stages
        self.timeout_seconds = timeout_seconds
        self._update = AveragedUpdate(
            every=every, outer=outer, averages_optimizer=average_optimizer
        )
        self._engine = engine
        self._mirrored: MirroredHosts | Mirrored
        self._pipelines: PipelinesOnHosts | None = None
        if isinstance(devices, Sequence):
            check_devices(devices)
            check_leave(devices, engine)
            backend_for(engine, device_names(devices, discover().hosts[0]))
            self.reach = "one host"
            self.devices: Devices = devices
            self._mirrored = Mirrored(devices=tuple(devices), channels_last=channels_last)
            return
        check_number("devices", devices)
        if devices is None and find_place(os.environ) is None:
            devices = find_devices(os.environ)
        self.devices = devices
        self._mirrored = MirroredHosts(devices_per_host=devices, channels_last=channels_last)
        names = device_names(devices, discover().cores.hosts[0])
        if stages is not None:
            _check_multiple(len(names), devices, stages)
            options = {"stages": stages, "microbatches": microbatches, "schedule": schedule}
            self._pipelines = _pipelines(len(names) // stages, cuts, **options)

    def maker(self, precision: str = "fp32") -> Maker:
        maker: Maker = replace(self._mirrored, precision=precision)
        if self._pipelines is not None:
            on_each = replace(self._pipelines.on_each, precision=precision)
            maker = replace(self._pipelines, on_each=on_each)
        if isinstance(self.devices, Sequence):
            steps = LocalSteps(maker=maker, update=self._update, on_cores=False)
            return over(self._engine, steps)
        return compressed(self._compression, LocalSteps(maker=maker, update=self._update))

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all hosts; see ``MultiWorkerMirroredStrategy``."""
        if isinstance(self._mirrored, Mirrored):
            return len(device_names(self.devices, discover().hosts[0]))
        ranks = num_replicas(self._mirrored, self.timeout_seconds, on_cores=True)
        return ranks // (self.stages or 1)


def _check_averaging(
    problems: Problems, every: object, outer: object, average_optimizer: object
) -> None:
    if not is_every(every):
        problems.add(
            "`every` must be a number of steps, at least 1, or 'epoch'.",
            received=f"every={every!r}",
            fix="Use every=16, for example.",
        )
    if outer is not None and not isinstance(outer, Nesterov):
        problems.add(
            "`outer` must be a lockstep.Nesterov.",
            received=f"outer={outer!r}",
            fix="Use lockstep.Nesterov(lr=0.7, momentum=0.9), or leave it out.",
        )
    fix = "Leave it out for an optimizer of each replica's own."
    check_flag("average_optimizer", average_optimizer, problems, fix=fix)


def _check_accelerators(
    problems: Problems, devices: Devices, engine: str | None, **options: Any
) -> None:
    """Note options that are for cores where accelerators are named, and the other way round."""
    if not isinstance(devices, Sequence):
        if engine is not None:
            problems.add(
                "`engine` is for replicas on accelerators.",
                received=f"engine={engine!r} with devices={devices!r}",
                fix='Name the accelerators, devices=["cuda:0", "cuda:1"], or leave it out.',
            )
        return
    given = {name: one for name, one in options.items() if one is not None}
    if given:
        problems.add(
            "Replicas on accelerators are of one device and one host each.",
            received=", ".join(f"{name}={one!r}" for name, one in given.items()),
            fix="Leave it out, or train on cores: devices=2, for example.",
        )


def _pipelines(replicas: int, cuts: Sequence[str] | None, **options: Any) -> PipelinesOnHosts:
    named = None if cuts is None else tuple(cuts)
    return PipelinesOnHosts(on_each=Pipelined(replicas=replicas, cuts=named, **options))


def _check_stages(problems: Problems, stages: int | None, **options: Any) -> None:
    """Note invalid options of pipelines, and such options without pipelines."""
    if stages is None:
        given = {name: one for name, one in options.items() if one not in (None, "1f1b")}
        if given:
            problems.add(
                "Options of pipelines need `stages`: without, every replica is one device.",
                received=", ".join(f"{name}={one!r}" for name, one in given.items()),
                fix="Pass the number of stages: stages=2, for example.",
            )
        return
    check_counts(problems, stages=stages, microbatches=options["microbatches"])
    check_cuts(problems, options["cuts"])
    check_choice("schedule", options["schedule"], SCHEDULES, problems, fix="Use '1f1b'.")


def _check_whole(
    problems: Problems, stages: object, average_optimizer: object, channels_last: object
) -> None:
    """Note options that need replicas with the whole model on one device."""
    given = {"average_optimizer": average_optimizer or None, "channels_last": channels_last}
    named = [f"{name}={one!r}" for name, one in given.items() if one is not None]
    if stages is not None and named:
        problems.add(
            "Each pipeline keeps its own optimizer, and chooses its memory format.",
            received=f"stages={stages!r} with {', '.join(named)}",
            fix="Leave it out, or use replicas of one device.",
        )


def _check_multiple(count: int, devices: int | None, stages: int) -> None:
    """Check that devices form complete pipelines.

    Raises:
        DeviceError: the number of devices is no multiple of ``stages``.
    """
    if count % stages:
        raise DeviceError(
            "Every replica needs a device for each of its stages.",
            received=f"{count} devices{'' if devices else ', as many as there are,'} and "
            f"stages={stages}",
            fix=f"Use devices={max(count // stages, 1) * stages}, for example.",
        )
