"""The likely cause of the first difference of two records, from the numbers.

Digests are linear, so hypotheses can be tried on them: whether the gradients are the reference's
times a constant; whether the ranks' own gradients add up to it; whether each rank's shard was
scaled by a factor of its own; whether the gradients of the step before are still in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lockstep.proof.recording.record_frames import BUFFER, GRADIENT, PARAMETER, START
from lockstep.proof.records import sample_causes, update_causes
from lockstep.proof.records.batches import losses_of
from lockstep.proof.records.comparison import LOSS, RANDOM, SAMPLES, Difference, Pairing, module_of
from lockstep.proof.records.factors import explain_factor
from lockstep.proof.records.run import Run, Value
from lockstep.proof.records.sample_causes import Cause
from lockstep.proof.records.update_causes import ranks_disagree

_FIT = 16.0  # times the tolerance: estimates of a few numbers, each with its own rounding


def find_cause(pairing: Pairing) -> Cause | None:
    """The likely cause of the first difference; None if all agrees."""
    first = pairing.first
    if first is None:
        return None
    if first.kind in (SAMPLES, RANDOM):
        return sample_causes.find(pairing, first)
    if first.step == START:
        return _initial_weights(pairing, first)
    if pairing.is_single:
        return _among_ranks(pairing, first)
    if first.kind in (LOSS, GRADIENT):
        return _of_gradients(_Gradients(pairing, first.step), first)
    return update_causes.find(pairing, first)


def _initial_weights(pairing: Pairing, first: Difference) -> Cause:
    if ranks_disagree(pairing.run, PARAMETER, START):
        return Cause(
            "ranks differ",
            "The ranks began with different weights. Nothing has sent rank 0's to the others: "
            "build the model under the same seed on all ranks, or broadcast it.",
        )
    return Cause(
        "initial weights",
        f"The weights differ before the first update, {first.name} first: another seed, another "
        "order of random draws, or another checkpoint.",
    )


def _among_ranks(pairing: Pairing, first: Difference) -> Cause:
    """The cause of a difference between the ranks of one record."""
    if first.kind in (LOSS, GRADIENT):
        given = _Gradients(pairing, first.step)
        return _missing_gradient(given) or Cause(
            "not summed over ranks",
            f"In step {first.step} {given.shown()} differ between ranks. No hook has summed them: "
            "the wrapper's forward was not called, no_sync was active in the last backward pass, "
            "or these parameters are outside of the wrapper.",
        )
    return update_causes.find(pairing, first)


# --- gradients ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gradients:
    """The gradients of the first step that differs."""

    pairing: Pairing
    step: int

    @cached_property
    def differing(self) -> list[str]:
        """Names of those that differ."""
        found = self.pairing.of(GRADIENT, self.step)
        return [each.name for each in found if not each.agrees]

    def of(self, run: Run, step: int | None = None) -> dict[str, Value]:
        """All of a run, by name."""
        values = run.values(self.step if step is None else step)
        return {name: value for (kind, name), value in values.items() if kind == GRADIENT}

    @cached_property
    def own(self) -> dict[str, Value]:
        """Of the run."""
        return self.of(self.pairing.run)

    @cached_property
    def reference(self) -> dict[str, Value]:
        """Of the reference."""
        return self.of(self.pairing.reference)

    @cached_property
    def names(self) -> list[str]:
        """Those that differ and that both have."""
        return [name for name in self.differing if name in self.own and name in self.reference]

    def stack(self, rows: Callable[[str], np.ndarray]) -> np.ndarray:
        """Projections of the gradients that differ, each in parts of the reference's norm."""
        found = []
        for name in self.names:
            size = self.reference[name].size or 1.0
            found.append(rows(name)[2:] / size)
        return np.nan_to_num(np.concatenate(found)) if found else np.zeros(0)

    @cached_property
    def expected(self) -> np.ndarray:
        """The reference's projections."""
        return self.stack(lambda name: _first(self.reference[name]))

    @cached_property
    def actual(self) -> np.ndarray:
        """The run's projections, as its first rank has them."""
        return self.stack(lambda name: _first(self.own[name]))

    def by_rank(self) -> list[np.ndarray]:
        """Each rank's own version, where all have the whole tensor."""
        ranks = self.pairing.run.ranks
        if any(self.own[name].versions.keys() != ranks.keys() for name in self.names):
            return []
        return [self.stack(lambda name, r=rank: self.own[name].versions[r]) for rank in ranks]  # type: ignore[misc]

    def by_shard(self) -> list[np.ndarray]:
        """What each rank's shards contribute."""
        if not any(self.own[name].is_sharded for name in self.names):
            return []
        return [
            self.stack(lambda name, r=rank: _contribution(self.own[name], r))  # type: ignore[misc]
            for rank in self.pairing.run.ranks
        ]

    @property
    def allowed(self) -> float:
        """The largest part that a hypothesis may leave unexplained."""
        dtype = self.own[self.names[0]].dtype if self.names else "float32"
        return _FIT * self.pairing.tolerance.relative(dtype, self.step)

    def fit(self, columns: Sequence[np.ndarray], target: np.ndarray) -> np.ndarray | None:
        """Coefficients that make the target of the columns; None if there are none."""
        if not columns or len(target) < 2 * len(columns) or not np.any(target):
            return None
        matrix = np.stack(columns, 1)
        found = np.linalg.lstsq(matrix, target, rcond=None)[0]
        rest = np.linalg.norm(matrix @ found - target) / np.linalg.norm(target)
        return found if rest <= self.allowed else None

    @cached_property
    def loss_agrees(self) -> bool:
        """Whether the loss over the whole batch was recorded and is that of the reference."""
        found = self.pairing.of(LOSS, self.step)
        return bool(found) and all(each.agrees for each in found)

    def shown(self) -> str:
        """The names, in a few words."""
        total = len(self.reference)
        if len(self.differing) == total:
            return "all gradients"
        few = ", ".join(self.differing[:3]) + (", ..." if len(self.differing) > 3 else "")
        return f"{len(self.differing)} of {total} gradients ({few})"


def _of_gradients(given: _Gradients, first: Difference) -> Cause:
    for find in (
        _reference_differs,
        _missing_gradient,
        _not_summed,
        _scaled_by_rank,
        _scaled,
        _left_from_before,
        _replicas_differ,
        _dropout,
        _batch_statistics,
        _mean_of_means,
    ):
        cause = find(given)
        if cause is not None:
            return cause
    if not given.loss_agrees and first.kind == LOSS:
        return Cause(
            "forward",
            "Samples and weights agree, the loss does not: look at the forward pass, at what is "
            "set to evaluation, and at the loss's weight.",
        )
    if ranks_disagree(given.pairing.run, GRADIENT, given.step):
        return Cause(
            "ranks differ",
            f"The ranks have different gradients in step {given.step}, and they do not add up to "
            "the reference's.",
        )
    return Cause(
        "gradients",
        f"In step {given.step} {given.shown()} differ, by no constant factor: look at the loss, "
        "and at what is done to gradients before the update.",
    )


def _reference_differs(given: _Gradients) -> Cause | None:
    """Whether only the reference shows a fault by itself, as where the two were exchanged."""
    run, reference = given.pairing.run, given.pairing.reference
    if ranks_disagree(run, GRADIENT, given.step):
        return None
    if not ranks_disagree(reference, GRADIENT, given.step):
        return None
    return Cause(
        "reference",
        f"The ranks of the reference have different gradients in step {given.step}, and those of "
        f"the run have not: look at the reference (lockstep compare {reference.path}).",
    )


def _missing_gradient(given: _Gradients) -> Cause | None:
    missing = [name for name in given.differing if name not in given.own]
    options = next(iter(given.pairing.run.options(given.step).values()))
    if missing and missing[0] not in options:
        return Cause(
            "never moved",
            f"{missing[0]} is in no group of the optimizer, and in the reference it is: it was "
            "replaced after the optimizer was made, or filtered out.",
        )
    if missing and set(missing) == set(given.differing):
        return Cause(
            "never moved",
            f"{missing[0]} has no gradient in step {given.step}, and the reference has one: it is "
            "frozen, detached, or replaced by another tensor.",
        )
    partly = [name for name in given.names if _lacking_ranks(given, name)]
    if not partly:
        return None
    ranks = _listed(_lacking_ranks(given, partly[0]))
    return Cause(
        "not summed over ranks",
        f"{partly[0]} has no gradient on {ranks}, where no sample used it: without "
        "find_unused_parameters=True its sum is not made.",
    )


def _lacking_ranks(given: _Gradients, name: str) -> list[int]:
    value = given.own[name]
    if value.is_sharded:
        return []
    return [rank for rank in given.pairing.run.ranks if rank not in value.ranks]


def _not_summed(given: _Gradients) -> Cause | None:
    """Whether each rank has its own gradient, and together they are the reference's."""
    if not ranks_disagree(given.pairing.run, GRADIENT, given.step):
        return None
    versions = given.by_rank()
    if len(versions) < 2:
        return None
    factors = [given.fit([given.expected], each) for each in versions]
    if all(each is not None for each in factors):
        return _by_rank([float(each[0]) for each in factors if each is not None])
    if given.fit(versions, given.expected) is None:
        return None
    return Cause(
        "not summed over ranks",
        f"In step {given.step} {given.shown()} differ between ranks, and their mean is the "
        "reference's. No hook has summed them: the wrapper's forward was not called, no_sync was "
        "active in the last backward pass, or these parameters are outside of the wrapper.",
    )


def _scaled_by_rank(given: _Gradients) -> Cause | None:
    """Whether each rank's shard was scaled by a factor of its own."""
    shards = given.by_shard()
    found = given.fit(shards, given.expected)
    if len(shards) < 2 or found is None or np.any(found == 0):
        return None
    factors = [float(1 / each) for each in found]
    spread = max(factors) - min(factors)
    if spread <= given.allowed * max(map(abs, factors)):
        return None
    return _by_rank(factors)


def _by_rank(factors: Sequence[float]) -> Cause:
    shown = ", ".join(f"{each:.4g} on rank {rank}" for rank, each in enumerate(factors))
    return Cause(
        "clipping per rank",
        f"Each rank has scaled its gradients by a factor of its own: {shown}. They are clipped to "
        "the norm of a part: clip to the norm of all ranks' gradients.",
    )


def _scaled(given: _Gradients) -> Cause | None:
    found = given.fit([given.expected], given.actual)
    if found is None:
        return None
    factor = float(found[0])
    return explain_factor(given.pairing, given.step, factor, given.shown(), given.allowed)


def _left_from_before(given: _Gradients) -> Cause | None:
    before = given.of(given.pairing.run, given.step - 1) if given.step > 0 else {}
    if not before or any(name not in before for name in given.names):
        return None
    previous = given.stack(lambda name: _first(before[name]))
    found = given.fit([previous], given.actual - given.expected)
    if found is None or abs(found[0] - 1) > 0.01:
        return None
    return Cause(
        "gradients left over",
        f"The gradients of step {given.step} are the reference's and those of step "
        f"{given.step - 1}: zero_grad was not called between them.",
    )


def _replicas_differ(given: _Gradients) -> Cause | None:
    """Whether something has changed parameters on some ranks since the last update."""
    run, step = given.pairing.run, given.step
    if ranks_disagree(run, GRADIENT, step) or not ranks_disagree(run, PARAMETER, step):
        return None
    return Cause(
        "ranks differ",
        f"The ranks have the same gradients in step {step}, and different parameters behind it: "
        "something has changed parameters on some ranks only, between this update and the last.",
    )


def _dropout(given: _Gradients) -> Cause | None:
    run = given.pairing.run
    drawing = [each for each in run.first.header.modules if each.share > 0]
    if given.loss_agrees or not drawing:
        return None
    if run.draws_alike:
        return sample_causes.alike(drawing[0].name)
    return Cause(
        "dropout",
        f"The model drops values ({drawing[0].name}), and draws others than the reference: no two "
        "layouts draw alike. Record both with dropout set to 0.",
    )


def _batch_statistics(given: _Gradients) -> Cause | None:
    run = given.pairing.run
    norms = [each for each in run.first.header.modules if each.kind.startswith("BatchNorm")]
    if given.loss_agrees or not norms:
        return None
    wrong = [each for each in given.pairing.of(BUFFER, given.step) if not each.agrees]
    local = [each for each in wrong if module_of(each.name) in {m.name for m in norms}]
    if not local:
        return None
    parts = "replica" if run.world_size > 1 else "part of a batch"
    return Cause(
        "batch statistics",
        f"{norms[0].name} ({norms[0].kind}) has the statistics of each {parts}, not of the whole "
        "batch: convert the model with SyncBatchNorm, or accept that the batch of a replica is "
        "what is normalised.",
    )


def _mean_of_means(given: _Gradients) -> Cause | None:
    losses = losses_of(given.pairing.run, given.step)
    weights = [each.weight for each in losses]
    known = [each for each in weights if each is not None]
    if len(known) < len(weights) or len(set(known)) < 2:
        return None
    if given.pairing.of(LOSS, given.step) and not given.loss_agrees:
        return None
    shown = ", ".join(f"{each:g}" for each in known[:6]) + (", ..." if len(known) > 6 else "")
    return Cause(
        "mean of means",
        f"The loss is a mean over shares of unequal weight ({shown}), and the gradients are the "
        "mean of their means. Divide each share's sum by the weight of the whole batch, times the "
        "number of ranks if gradients are averaged.",
    )


# --- values -------------------------------------------------------------------------------------


def _first(value: Value) -> np.ndarray:
    return value.versions[min(value.versions)]


def _contribution(value: Value, rank: int) -> np.ndarray:
    """What a rank's shard adds to the whole; of copies the lowest rank's counts."""
    mine = [own[rank] for own in value.parts.values() if min(own) == rank]
    return np.sum(mine, axis=0) if mine else np.zeros_like(_first(value))


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
