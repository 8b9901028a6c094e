"""Runs Lockstep and the plain loop side by side, and compares them after every step.

Only the figures are kept, so memory does not grow with the steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn, optim

from lockstep.accelerators import rank_device
from lockstep.errors import NonFiniteGradientError, NonFiniteLossError
from lockstep.parallel.debug.module_watch import ModuleWatch, Noted, WatchedSteps
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.makers.compressed import COMPRESSED
from lockstep.plan.makers.data_parallel import INEXACT
from lockstep.plan.spec import Plan
from lockstep.proof.comparison import (
    GRADIENT,
    LOSS,
    Comparison,
    compare_replicas,
    compare_states,
    compare_step,
    norm_of,
    rounding_mask,
)
from lockstep.proof.compressed import CompressedReference, SimulatedHosts
from lockstep.proof.job import Job, copy_job
from lockstep.proof.job_data import JobData
from lockstep.proof.reference import Record, Reference
from lockstep.proof.replicas import Replicas, is_synchronous
from lockstep.train.callbacks.callback import Callback, Logs
from lockstep.train.callbacks.driver import Snapshot
from lockstep.train.runtime.job_context import StrategyLike
from lockstep.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class ProofSetup:
    """The training that a proof runs.

    Attributes:
        job: model, loss and optimizer; each run copies them.
        data: of both sides.
        strategy: Lockstep's.
        steps: updates to make.
        seed: of all random numbers.
    """

    job: Job
    data: JobData
    strategy: StrategyLike
    steps: int
    seed: int


class ComparedRun:
    """A run of both sides, from the start.

    Args:
        setup: the training.
        watched_steps: the steps in which the values of modules are recorded; None for none.

    Attributes:
        comparisons: of all steps.
        trainer: Lockstep's side.
        look: ``watched_steps``, which ``Trainer.fit`` reads from ``on_snapshot``.
        watched: the last watched step: its snapshot, and the values of the reference's modules.
    """

    def __init__(self, setup: ProofSetup, watched_steps: WatchedSteps | None = None) -> None:
        self.comparisons: list[Comparison] = []
        self.look = watched_steps
        self.watched: tuple[Snapshot, Noted] | None = None
        self._data = setup.data
        self._replicas: Replicas | None = None
        self._make = partial(make_reference, setup)
        self.trainer = make_trainer(copy_job(setup.job), setup.strategy, "fp64", setup.seed)
        self._rounding: dict[str, torch.Tensor] = {}
        self._steps = 0
        self._updates = 0

    def run(self, steps: int) -> None:
        """Train both sides, and compare every step."""
        try:
            fit_steps(self.trainer, self._data, steps, self)
            self._check_complete(steps)
        except NonFiniteLossError as error:
            self._compare_failure(error)
        except NonFiniteGradientError as error:
            self._compare_gradient(error)

    def __call__(self, snapshot: Snapshot) -> None:
        """Make the reference's step, and compare."""
        update = self.trainer.plan.update
        if isinstance(update, AveragedUpdate):
            self._compare_averaged(snapshot, update)
            return
        if self.look is None or snapshot.step not in self.look.steps:
            record = self._step(snapshot)
        else:
            with ModuleWatch(self._reference.model).watching() as noted:
                record = self._step(snapshot)
            self.watched = snapshot, noted
        self._count(record)
        self.comparisons += compare_step(snapshot, record)

    @cached_property
    def _reference(self) -> Reference:
        """The plain loop, made after the trainer's first step, which makes the Plan."""
        plan = self.trainer.plan
        if plan.compression is None or isinstance(plan.update, AveragedUpdate):
            return self._reference_of(None)
        hosts = SimulatedHosts(plan.compression, plan.num_hosts)
        return self._reference_of(None, hosts=hosts, host_of=partial(host_of_gradient, plan))

    def _reference_of(self, shares: range | None, **compressed: Any) -> Reference:
        return self._make(shares, rank_device(self.trainer.plan.devices, 0), **compressed)

    @property
    def _is_linear(self) -> bool:
        """True if the update is linear in the gradient, so that rounding stays small."""
        return type(self._reference.optimizer) is optim.SGD

    @property
    def model(self) -> nn.Module:
        """The reference's model."""
        return self._reference.model

    def undetermined(self) -> Iterator[str]:
        """Parameters whose gradient was only rounding in some step, in part or whole."""
        for name, mask in self._rounding.items():
            yield name if mask.all() else f"{name} ({int(mask.sum())} of {mask.numel()} elements)"

    def notes(self) -> Iterator[str]:
        """Remarks for the report."""
        first = self._reference if self._replicas is None else self._replicas.references[0]
        yield from first.notes
        if not self._updates:
            yield "no batch weighed anything, so nothing was updated"

    def _compare_averaged(self, snapshot: Snapshot, update: AveragedUpdate) -> None:
        """Compare local SGD with simulated replicas, or with one device where that is equal."""
        if self.is_synchronous:
            record = self._step(None)
            self._count(record)
            self.comparisons += compare_states(snapshot, [record] * len(snapshot.states))
            return
        if self._replicas is None:
            self._replicas = self._simulated_replicas(self.trainer.plan, update)
        plan = self.trainer.plan
        size = plan.ranks_per_replica
        records = self._replicas.step(
            plan.num_shares, snapshot.weights[::size], partial(self._before_update, snapshot)
        )
        self._count(records[0])
        of_ranks = [record for record in records for _ in range(size)]
        self.comparisons += compare_replicas(snapshot, of_ranks)

    @property
    def is_synchronous(self) -> bool:
        """True if the ranks train together, or their averages equal synchronous training."""
        update, reference = self.trainer.plan.update, self._reference
        return not isinstance(update, AveragedUpdate) or (
            self.trainer.plan.compression is None
            and is_synchronous(update, reference.optimizer, reference.model)
        )

    @property
    def inexact(self) -> str:
        """Why the strategy's result is not that of one device; empty if it must be."""
        if not self.is_synchronous:
            return INEXACT
        return "" if self.trainer.plan.compression is None else COMPRESSED

    def _simulated_replicas(self, plan: Plan, update: AveragedUpdate) -> Replicas:
        """Simulated replicas of local SGD."""
        replicas, size = range(plan.num_replicas), plan.ranks_per_replica
        references = [self._reference_of(plan.shares_of(replica)) for replica in replicas]
        hosts = None
        if plan.compression is not None:
            hosts = SimulatedHosts(plan.compression, plan.num_hosts)

        def host_of(replica: int) -> int:
            return plan.host_of(replica * size)

        return Replicas(references, update, self._data.steps_per_epoch, hosts, host_of)

    def _count(self, record: Record) -> None:
        self._steps += 1
        self._updates += record.loss is not None

    def _step(self, snapshot: Snapshot | None) -> Record:
        return self._reference.step(
            self.trainer.plan.num_shares, partial(self._before_update, snapshot)
        )

    def _before_update(
        self, snapshot: Snapshot | None, parameters: dict[str, nn.Parameter]
    ) -> None:
        if snapshot is not None and not self._is_linear:
            self._take_rounding(parameters, snapshot)

    @torch.no_grad()
    def _take_rounding(self, parameters: dict[str, nn.Parameter], snapshot: Snapshot) -> None:
        dense = {
            name: parameter.grad
            for name, parameter in parameters.items()
            if parameter.grad is not None and not parameter.grad.is_sparse
        }
        scale = norm_of(dense.values())
        for name, gradient in dense.items():
            actual = snapshot.gradients.get(name)
            if actual is None or actual.shape != gradient.shape:
                continue
            mask = rounding_mask(gradient, actual, scale)
            if mask.any():
                gradient.copy_(actual.where(mask, gradient))
                self._rounding[name] = mask | self._rounding.get(name, mask)

    def _compare_failure(self, error: NonFiniteLossError) -> None:
        """Lockstep stopped at a non-finite loss; the reference's must not be finite, either."""
        record = self._step(None)
        if record.loss is not None and not math.isfinite(record.loss):
            raise error
        self._note_difference(record.step, f"not finite, the reference has {record.loss}")

    def _compare_gradient(self, error: NonFiniteGradientError) -> None:
        """Lockstep stopped at a non-finite gradient; the reference's must not be finite, either."""
        gradient = self._step(None).gradients[error.parameter]
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            raise error
        self.comparisons.append(
            Comparison(
                kind=GRADIENT,
                name=error.parameter,
                rank=None,
                step=error.step,
                relative=math.inf,
                remark="not finite, the reference's is",
            )
        )

    def _check_complete(self, steps: int) -> None:
        if self._steps != steps:
            self._note_difference(self._steps, f"{self._steps} steps were made instead of {steps}")

    def _note_difference(self, step: int, remark: str) -> None:
        self.comparisons.append(
            Comparison(kind=LOSS, name="", rank=None, step=step, relative=math.inf, remark=remark)
        )


def make_reference(
    setup: ProofSetup, shares: range | None, device: torch.device, **compressed: Any
) -> Reference:
    """Make a plain loop that trains on whole batches or on some of their shares.

    Args:
        setup: the training.
        shares: the shares of each batch; None for all.
        device: of the model.
        compressed: options of ``CompressedReference``; empty without compression.
    """
    own = copy_job(setup.job, device=device)
    kind = CompressedReference if compressed else Reference
    return kind(
        own.model,
        own.loss,
        own.optimizer,
        setup.data.batches(),
        seed=setup.seed,
        loss_weights=own.loss_weights,
        shares=shares,
        train_step=own.train_step,
        dims=own.dims,
        **compressed,
    )


def host_of_gradient(plan: Plan, name: str, share: int) -> int:
    """The host that computes a share's gradient of a parameter."""
    if plan.pipeline is None:
        return plan.host_of(plan.replica_of(share))
    owners = (one for one in plan.layers if name.startswith(f"{one.name}.".lstrip(".")))
    ranks = plan.pipeline.stages[max(owners, key=lambda one: len(one.name)).stage].ranks
    return plan.host_of(ranks[share % len(ranks)])


def make_trainer(own: Job, strategy: StrategyLike, precision: str, seed: int) -> Trainer:
    """Make a Trainer of a copied job."""
    return Trainer(
        own.model,
        loss=own.loss,
        optimizer=own.optimizer,
        strategy=strategy,
        precision=precision,
        seed=seed,
        loss_weights=own.loss_weights,
        train_step=own.train_step,
        batch_dim=own.batch_dim,
    )


def fit_steps(trainer: Trainer, data: JobData, steps: int, on_snapshot: Any) -> None:
    """Train for ``steps`` steps, with a snapshot of each."""
    trainer.callbacks = [_StopAfter(steps)] if data.options["epochs"] > 1 else []
    try:
        trainer.fit(data.given, **data.options, verbose=0, on_snapshot=on_snapshot)
    finally:
        trainer.callbacks = []


class _StopAfter(Callback):
    """Stops training after some steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self.trainer.stop_training = self._left == 0
        self._left -= 1
