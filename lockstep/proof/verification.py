"""``lockstep.verify``: trains a job under a strategy and, beside it, with a plain loop.

Both advance step by step (``proof.compare_run``); each step costs one plain step more, in float64.
If they differ, the effect of rounding on this training is measured (``proof.conditioning``). If
they differ by more, the run is repeated to find the module where it begins (``proof.locating``).

A gradient may be only rounding on both sides (``comparison.rounding_mask``). If the optimizer
divides by its size, the reference takes Lockstep's digits before its update: they are as good as
its own, and the parameter, its slots and everything that depends on them can still be compared.
Such parameters are reported.
"""

from typing import Any

import torch

from lockstep.accelerators import rank_device
from lockstep.data.order import kept_streams
from lockstep.errors import LockstepError, ModelError, OptionError, Problems
from lockstep.options import check_count, check_seed
from lockstep.parallel.debug.module_watch import WatchedSteps
from lockstep.plan.spec import Plan
from lockstep.proof.bits import BitsProof, Verdict
from lockstep.proof.compare_run import ComparedRun, ProofSetup, make_reference
from lockstep.proof.comparison import KINDS, TOLERANCE, Comparison
from lockstep.proof.conditioning import Conditioning, measure
from lockstep.proof.job import Job
from lockstep.proof.job_data import data_of
from lockstep.proof.locating import Cause, locate, not_repeated
from lockstep.proof.report import Report, first_of, make_report
from lockstep.tracebacks import leaving
from lockstep.train.runtime.job_context import StrategyLike
from lockstep.train.validation.checks import check_strategy


def verify_job(
    job: Job,
    strategy: StrategyLike,
    *,
    steps: int = 5,
    seed: int = 0,
    bits: bool = False,
    self_test: bool = False,
) -> Report:
    """Prove that a strategy gives the weights that one device would have given.

    The job's model and optimizer are copied and stay unchanged. Both sides train in float64,
    unshuffled, for several epochs if the data has fewer batches than ``steps``.

    Args:
        job: the training.
        strategy: the strategy to prove.
        steps: updates to compare.
        seed: of dropout and all other random numbers.
        bits: also train as ``fit`` would, in the precision of the model, and compare to the last
            bit: with a second run, with one device and as many shares, and with one device
            undivided.
        self_test: also add one unit in the last place to an output and to a gradient of one rank,
            in the last step, and check that the comparison of bits names each.

    Returns:
        A report: ``report.passed``, ``report.undivided``, ``report.cause`` of a difference,
        ``print(report)`` for the table, and ``report.as_dict()`` for JSON.

    Raises:
        OptionError: an argument has the wrong type or value.
        ModelError: the model cannot be copied, or cannot compute in float64.
        LockstepError: any error that ``Trainer.fit`` raises for this job.
    """
    _check(job, strategy, steps, seed)
    # Copies made in inference mode could not be trained.
    with leaving, torch.inference_mode(False):
        return _verify(job, strategy, steps, seed, bits=bits, self_test=self_test)


def _verify(
    job: Job, strategy: StrategyLike, steps: int, seed: int, *, bits: bool, self_test: bool
) -> Report:
    data = data_of(job, steps, seed)
    setup = ProofSetup(job=job, data=data, strategy=strategy, steps=steps, seed=seed)
    run = ComparedRun(setup)
    conditioning, cause = None, None
    verdicts: list[Verdict] = []
    with kept_streams():
        try:
            run.run(steps)
        except RuntimeError as error:
            if _is_about_precision(error):
                raise ModelError(
                    "A proof needs a model and a loss that compute in the precision of their "
                    "inputs.",
                    received=str(error).partition("\n")[0],
                    fix="Where they make tensors, use x.new_zeros(...) or dtype=x.dtype.",
                ) from error
            raise
        comparisons = run.comparisons
        agreed = run.trainer.same_everywhere  # rank 0 compares; all hosts follow it
        if not run.inexact and agreed(first_of(comparisons)) is not None:
            conditioning = _conditioning(setup, run.trainer.plan)
            comparisons = conditioning.loosened(comparisons)
            first = agreed(first_of(comparisons))
            cause = _cause(setup, first, conditioning)
        if bits or self_test:
            proof = BitsProof(setup, agreed)
            verdicts += proof.verdicts() if bits else []
            verdicts += proof.planted() if self_test else []
    plan = run.trainer.plan
    undivided = _undivided(plan)
    reasons = plan.notes if undivided else (run.inexact,) if run.inexact else ()
    report = make_report(
        _title(plan, steps, data.size, simulated=_simulated(plan, run)),
        comparisons,
        run.undetermined(),
        [*run.notes(), *reasons],
        undivided,
        conditioning=conditioning,
        cause=cause,
        bits=verdicts,
    )
    return agreed(report)


def _conditioning(setup: ProofSetup, plan: Plan) -> Conditioning:
    """Measure the effect of rounding."""
    device = rank_device(plan.devices, 0)
    one, other = (make_reference(setup, None, device) for _ in range(2))
    steps, limit = setup.steps, setup.data.num_batches
    possible = steps if limit is None else min(steps, limit)
    return measure(one, other, plan.num_shares, possible)


def _cause(setup: ProofSetup, first: Comparison | None, conditioning: Conditioning) -> Cause | None:
    """Repeat the steps up to the first difference, and record the modules' values in its step."""
    if first is None:
        return None
    watched_steps = WatchedSteps(steps=range(first.step, first.step + 1))
    run = ComparedRun(setup, watched_steps)
    try:
        run.run(first.step + 1)
    finally:
        run.trainer.close()
    again = first_of(conditioning.loosened(run.comparisons))
    if again is None or (again.step, again.kind) != (first.step, first.kind):
        return not_repeated(first)
    if run.watched is None:  # training stopped within the step
        return None
    tolerance = max(
        (conditioning.bound(kind, first.step) for kind in KINDS),
        default=TOLERANCE,
    )
    return locate(
        run.model, first, *run.watched, TOLERANCE if conditioning.module is None else tolerance
    )


def _simulated(plan: Plan, run: ComparedRun) -> str:
    """What the plain loop has to simulate, in words."""
    what = [] if run.is_synchronous else [f"{plan.num_replicas} replicas"]
    if plan.compression is not None:
        what.append(f"{plan.num_hosts} hosts that send {plan.compression}")
    return " on ".join(what)


def _title(plan: Plan, steps: int, size: str, *, simulated: str) -> str:
    plain = "a plain PyTorch loop"
    if simulated:
        plain += f" that simulates {simulated}"
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh) or "one device"
    return (
        f"{plan.strategy}, {mesh}, num_shares={plan.num_shares}, against {plain}: "
        f"{steps} {'step' if steps == 1 else 'steps'} of {size}, float64"
    )


def _undivided(plan: Plan) -> str:
    """A sentence if the Plan does not divide the model or the batch; else empty."""
    if plan.pipeline is not None and len(plan.pipeline.stages) == 1:
        if plan.num_ranks == 1:
            return "nothing was divided: the plan has one stage, on one device"
        if plan.tensor_degree == 1:
            replicas = f"{plan.num_ranks} replicas"
            return f"the model was not divided: the plan has one stage, on {replicas}"
        return ""
    if plan.mesh and plan.num_ranks == plan.num_shares == 1:
        return "nothing was divided: the plan has one replica, with all of each batch"
    return ""


def _is_about_precision(error: Exception) -> bool:
    if isinstance(error, LockstepError):
        return False
    return all(word in str(error).lower() for word in ("float", "double"))


def _check(job: object, strategy: object, steps: Any, seed: Any) -> None:
    problems = Problems()
    if not isinstance(job, Job):
        problems.add(
            "verify needs a lockstep.Job.",
            received=getattr(job, "__name__", type(job).__name__),
            fix="Pass lockstep.Job(model, loss, optimizer, data, batch_size), or call your "
            "function: verify(make_job(), strategy).",
        )
    check_strategy(strategy, problems)
    if getattr(strategy, "staleness", 0) != 0:
        problems.add(
            "Asynchronous workers have no defined result to compare with.",
            received=f"staleness={getattr(strategy, 'staleness', 0)}",
            fix="Verify with staleness=0, which runs the same code but waits.",
        )
    check_count("steps", steps, problems, fix="Use 5.")
    check_seed(seed, problems)
    problems.raise_if_any(OptionError)
