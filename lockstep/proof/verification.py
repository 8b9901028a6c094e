"""``lockstep.verify``: train a job under a strategy and, beside it, with a plain loop.

The two go step by step: after every step of Lockstep's the reference makes its own on the same
samples, both are compared, and only the figures are kept. So memory does not grow with the steps,
and a proof costs about one plain step more per step, in float64.

Where a gradient is nothing but rounding on both sides (see ``comparison.rounding_mask``) and the
optimizer divides by its size, the reference takes Lockstep's digits before its update. They are as
good as its own, both are zero but for the last bit of larger numbers, and so the parameter, its
slots and everything behind it (a running mean) can still be compared. Such parameters are reported.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from lockstep.data.excerpts import first_samples
from lockstep.data.order import restore_streams, stream_states
from lockstep.data.sources import Source, as_source
from lockstep.errors import (
    LockstepError,
    ModelError,
    NonFiniteGradientError,
    NonFiniteLossError,
    OptionError,
    Problems,
)
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.makers import INEXACT
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
from lockstep.proof.job import Job, copy_in_double
from lockstep.proof.reference import Record, Reference
from lockstep.proof.replicas import Replicas, is_synchronous
from lockstep.proof.report import Report, make_report
from lockstep.train.callbacks import Callback, Logs
from lockstep.train.checks import check_strategy
from lockstep.train.conductor import Snapshot
from lockstep.train.job_context import StrategyLike
from lockstep.train.trainer import Trainer


def verify_job(job: Job, strategy: StrategyLike, *, steps: int = 5, seed: int = 0) -> Report:
    """Prove that a strategy gives the weights that one device would have given.

    The job's model and optimizer are copied, not touched. Both sides train in float64, on the
    samples in their order, epoch after epoch where the data has fewer batches than ``steps``.

    Args:
        job: what to train.
        strategy: how.
        steps: updates to compare.
        seed: of dropout and all other random numbers.

    Returns:
        A report: ``report.passed``, ``report.undivided``, and ``print(report)`` for the table.

    Raises:
        OptionError: an argument cannot be what it is.
        ModelError: the model cannot be copied, or not compute in float64.
        LockstepError: whatever ``Trainer.fit`` raises for this job.
    """
    _check(job, strategy, steps, seed)
    with torch.inference_mode(False):  # what is copied in it could not be trained
        return _verify(job, strategy, steps, seed)


def _verify(job: Job, strategy: StrategyLike, steps: int, seed: int) -> Report:
    theirs = copy_in_double(job)
    source = as_source(job.data)

    def reference_of(share: int | None) -> Reference:
        ours = copy_in_double(job)
        return Reference(
            ours.model,
            ours.loss,
            ours.optimizer,
            source,
            batch_size=job.batch_size,
            seed=seed,
            loss_weights=job.loss_weights,
            share=share,
        )

    reference = reference_of(None)
    trainer = Trainer(
        theirs.model,
        loss=theirs.loss,
        optimizer=theirs.optimizer,
        strategy=strategy,
        precision="fp64",
        seed=seed,
        loss_weights=job.loss_weights,
    )
    proof = _Proof(reference, trainer, reference_of)
    states = stream_states()
    try:
        proof.run(source, job.batch_size, steps)
    except RuntimeError as error:
        if _is_about_precision(error):
            raise _not_in_double(error) from error
        raise
    finally:
        restore_streams(states)
    undivided = _undivided(trainer.plan)
    reasons = trainer.plan.notes if undivided else () if proof.is_synchronous else (INEXACT,)
    report = make_report(
        _title(trainer.plan, steps, job.batch_size, is_simulated=not proof.is_synchronous),
        proof.comparisons,
        proof.undetermined(),
        [*proof.notes(), *reasons],
        undivided,
    )
    return trainer.same_everywhere(report)  # rank 0 has compared


class _Proof:
    """A run of both sides.

    Args:
        reference: the plain loop.
        trainer: Lockstep.
        reference_of: makes one that trains on one share of each batch alone.
    """

    def __init__(
        self,
        reference: Reference,
        trainer: Trainer,
        reference_of: Callable[[int], Reference],
    ) -> None:
        self.comparisons: list[Comparison] = []
        self._reference = reference
        self._trainer = trainer
        self._reference_of = reference_of
        self._replicas: Replicas | None = None
        # The update is linear in the gradient: rounding stays rounding.
        self._linear = type(reference.optimizer) is optim.SGD
        self._rounding: dict[str, torch.Tensor] = {}
        self._steps = 0
        self._updates = 0

    def run(self, source: Source, batch_size: int, steps: int) -> None:
        """Train both, comparing every step."""
        self._steps_per_epoch = -(-len(source) // batch_size)
        epochs = -(-steps // self._steps_per_epoch) if len(source) else 1
        self._trainer.callbacks = [_StopAfter(steps)] if epochs > 1 else []
        try:
            self._trainer.fit(
                first_samples(source, steps * batch_size),
                epochs=epochs,
                batch_size=batch_size,
                shuffle=False,
                verbose=0,
                on_snapshot=self._compare,
            )
            self._check_complete(steps)
        except NonFiniteLossError as error:
            self._compare_failure(error)
        except NonFiniteGradientError as error:
            self._compare_gradient(error)
        finally:
            self._trainer.callbacks = []

    def undetermined(self) -> Iterator[str]:
        """The parameters of whose gradients something was rounding in some step."""
        for name, mask in self._rounding.items():
            yield name if mask.all() else f"{name} ({int(mask.sum())} of {mask.numel()} elements)"

    def notes(self) -> Iterator[str]:
        """What a person should know of this run."""
        first = self._reference if self._replicas is None else self._replicas.references[0]
        yield from first.notes
        if not self._updates:
            yield "no batch weighed anything, so nothing was updated"

    def _compare(self, snapshot: Snapshot) -> None:
        update = self._trainer.plan.update
        if isinstance(update, AveragedUpdate):
            self._compare_averaged(snapshot, update)
            return
        record = self._step(snapshot)
        self._count(record)
        self.comparisons += compare_step(snapshot, record)

    def _compare_averaged(self, snapshot: Snapshot, update: AveragedUpdate) -> None:
        """Ranks that train apart: with replicas that are simulated, or with one device."""
        if self.is_synchronous:
            record = self._step(None)
            self._count(record)
            self.comparisons += compare_states(snapshot, [record] * len(snapshot.states))
            return
        if self._replicas is None:
            references = [self._reference_of(rank) for rank in range(len(snapshot.states))]
            self._replicas = Replicas(references, update, self._steps_per_epoch)
        records = self._replicas.step(
            self._trainer.plan.num_shares, snapshot.weights, partial(self._settle, snapshot)
        )
        self._count(records[0])
        self.comparisons += compare_replicas(snapshot, records)

    @property
    def is_synchronous(self) -> bool:
        """Whether the ranks train together, or average what comes to the same."""
        update, reference = self._trainer.plan.update, self._reference
        return not isinstance(update, AveragedUpdate) or is_synchronous(
            update, reference.optimizer, reference.model
        )

    def _count(self, record: Record) -> None:
        self._steps += 1
        self._updates += record.loss is not None

    def _step(self, snapshot: Snapshot | None) -> Record:
        return self._reference.step(self._trainer.plan.num_shares, partial(self._settle, snapshot))

    def _settle(self, snapshot: Snapshot | None, parameters: dict[str, nn.Parameter]) -> None:
        if snapshot is not None and not self._linear:
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
            theirs = snapshot.gradients.get(name)
            if theirs is None or theirs.shape != gradient.shape:
                continue
            mask = rounding_mask(gradient, theirs, scale)
            if mask.any():
                gradient.copy_(theirs.where(mask, gradient))
                self._rounding[name] = mask | self._rounding.get(name, mask)

    def _compare_failure(self, error: NonFiniteLossError) -> None:
        """Lockstep has stopped at a loss that is not finite: so must the reference's be."""
        record = self._step(None)
        if record.loss is not None and not math.isfinite(record.loss):
            raise error
        self._note_difference(record.step, f"not finite, the reference has {record.loss}")

    def _compare_gradient(self, error: NonFiniteGradientError) -> None:
        """Lockstep has stopped at a gradient that is not finite: so must the reference's be."""
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


class _StopAfter(Callback):
    """Ends the training after some steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self.trainer.stop_training = self._left == 0
        self._left -= 1


def _title(plan: Plan, steps: int, batch_size: int, *, is_simulated: bool) -> str:
    plain = "a plain PyTorch loop"
    if is_simulated:
        plain += f" that simulates {plan.num_ranks} replicas"
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh) or "one device"
    return (
        f"{plan.strategy}, {mesh}, num_shares={plan.num_shares}, against {plain}: "
        f"{steps} {'step' if steps == 1 else 'steps'} of {batch_size} samples, float64"
    )


def _undivided(plan: Plan) -> str:
    """What there is to divide, where the Plan has it in one piece."""
    if plan.pipeline is not None and len(plan.pipeline.stages) == 1:
        if plan.num_ranks == 1:
            return "nothing was divided: the plan has one stage, on one device"
        return f"the model was not divided: the plan has one stage, on {plan.num_ranks} replicas"
    if plan.mesh and plan.num_ranks == plan.num_shares == 1:
        return "nothing was divided: the plan has one replica, with all of each batch"
    return ""


def _is_about_precision(error: Exception) -> bool:
    if isinstance(error, LockstepError):
        return False
    return all(word in str(error).lower() for word in ("float", "double"))


def _not_in_double(error: Exception) -> ModelError:
    return ModelError(
        "A proof needs a model and a loss that compute in the precision of their inputs.",
        received=str(error).partition("\n")[0],
        fix="Where they make tensors, use x.new_zeros(...) or dtype=x.dtype.",
    )


def _check(job: object, strategy: object, steps: Any, seed: Any) -> None:
    problems = Problems()
    if not isinstance(job, Job):
        problems.add(
            "verify needs a lockstep.Job.",
            received=getattr(job, "__name__", type(job).__name__),
            fix="Pass lockstep.Job(model, loss, optimizer, data, batch_size), or what your "
            "function returns: verify(make_job(), strategy).",
        )
    check_strategy(strategy, problems)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        problems.add(
            "`steps` must be an integer of at least 1.", received=repr(steps), fix="Use 5."
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
        problems.add(
            "`seed` must be an integer from 0 to 2**63 - 1.", received=repr(seed), fix="Use 0."
        )
    problems.raise_if_any(OptionError)
