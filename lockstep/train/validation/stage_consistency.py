"""The check of ``rank_consistency`` for a pipeline, whose stages each run a part of the model.

While rank 0 still has the whole model, it runs all stages in order on a few samples, forward and
backward, and records the values that stages exchange. Then every rank runs its own stages on the
recorded values. The values of all instructions, the loss, and gradients must have the bits of rank
0, also if several ranks hold a stage.

Not covered: stages on accelerators, for which rank 0 would need the memory of all; models whose
parameters have no values until ranks have their stages.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.capture.instructions import CallModule, GetAttribute
from lockstep.capture.seeding import gradients_of, seeded
from lockstep.capture.state import left_alone
from lockstep.data.map_style.sources import Batch
from lockstep.data.order import seed_streams
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.parallel.data_parallel.forward import modes_of
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.pipeline.microbatch_run import Gradients, MicrobatchRun
from lockstep.parallel.pipeline.stage_passes import StagePasses, StageTools, stage_output
from lockstep.parallel.worker import Worker
from lockstep.train.validation.rank_consistency import (
    LOSS,
    MOST_ELEMENTS,
    Print,
    batch_of,
    empty_memory_filled,
    first_difference,
    gradient_prints,
    is_like,
    is_same,
    place_of,
    print_of,
    unlike,
    values_of,
)


@dataclass(kw_only=True)
class Crossing:
    """The values that stages exchange and the results of rank 0; takes the place of messages.

    Attributes:
        batch: the samples.
        values: sent forward, by instruction.
        flags: for each tensor in a value, whether it requires a gradient.
        gradients: of these, from each stage that uses them.
        prints: the fingerprints of rank 0, by stage.
    """

    batch: Batch
    values: dict[int, Tree] = field(default_factory=dict)
    flags: dict[int, list[bool]] = field(default_factory=dict)
    gradients: dict[int, list[Gradients]] = field(default_factory=dict)
    prints: list[list[Print]] = field(default_factory=list)

    def receive(self, number: int, sender: int, share: int) -> Tree:
        """A value of another stage, as a new leaf."""
        flags = iter(self.flags[number])
        return map_tensors(lambda one: one.clone().requires_grad_(next(flags)), self.values[number])

    def send(self, stage: int, number: int, share: int, tree: Tree) -> None:
        """Record a value, on rank 0."""
        if number not in self.values:
            self.values[number] = map_tensors(lambda one: one.detach().clone(), tree)
            self.flags[number] = [one.requires_grad for one in tensors_of(tree)]


class _StageTrial(MicrobatchRun):
    """A stage on a few samples: the fingerprints of all its values."""

    def __init__(self, stage: int, tools: StageTools, crossing: Crossing) -> None:
        self.prints: list[Print] = []
        self._tools, self._crossing = tools, crossing
        self._losses: list[torch.Tensor] = []
        self._outputs: list[tuple[str, torch.Tensor]] = []
        self._after = "the beginning"
        super().__init__(
            stage=stage,
            share=0,
            part=tools.partition.parts[stage],
            instructions=tools.partition.instructions,
            model=tools.model,
            mail=crossing,  # type: ignore[arg-type]  # in its place
        )

    def go_forward(self) -> None:
        """Run the stage, and the loss if it is the last."""
        batch, loss = self._crossing.batch, self._tools.loss
        is_last = self.stage == len(self._tools.partition.parts) - 1
        seed_streams(0)
        loss.begin(batch.num_samples, 1)
        output = stage_output(self._tools.call, loss, self.forward, batch)
        if is_last:
            self._losses = values_of([loss(output, batch)])
        self.prints.append(print_of(LOSS, self._losses))  # also of none: it has come so far

    def go_backward(self) -> dict[int, Gradients]:
        """Gradients of the values that the stage has received, by instruction."""
        roots = self._roots()
        leaves = [
            (number, one)
            for number, tree in self._received.items()
            for one in tensors_of(tree)
            if one.requires_grad
        ]
        small = [
            (f"parameter {name!r}", parameter)
            for name in self.part.parameters
            if (parameter := self.model.get_parameter(name)).requires_grad
            and parameter.numel() <= MOST_ELEMENTS
        ]
        values = [(f"value {number} of another stage", one) for number, one in leaves]
        places = [*reversed(self._outputs), *small, *values]
        if not roots or not places:
            return {}
        root = seeded([one for one, _ in roots], [seed for _, seed in roots])
        found = gradients_of([root], [one for _, one in places], [*self.model.parameters()])
        self.prints += gradient_prints(places, found)
        gradients: dict[int, Gradients] = {}
        for (number, _), gradient in zip(leaves, found[-len(leaves) :], strict=False):
            gradients.setdefault(number, []).append(gradient)
        return gradients

    def close(self) -> None:
        """Release received values: their hooks form a cycle that Python cannot collect."""
        self._losses, self._outputs, self._inputs = [], [], None
        self._values, self._received, self._leaves, self._sent = {}, {}, {}, {}
        self.deferred.clear()

    def _roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors from which backward starts, with their gradients."""
        roots = [(one, torch.ones_like(one)) for one in self._losses if one.requires_grad]
        for number, tensors in self._sent.items():
            by_tensor = zip(*self._crossing.gradients.get(number, []), strict=True)
            for tensor, parts in zip(tensors, by_tensor, strict=False):
                known = [part for part in parts if part is not None]
                if known:
                    roots.append((tensor, torch.stack(known).sum(0)))
        return roots

    def _run(self, number: int) -> Any:
        value = super()._run(number)
        instruction = self.instructions[number]
        if isinstance(instruction, GetAttribute):
            return value
        if isinstance(instruction, CallModule):
            place = place_of(instruction.target, self.model.get_submodule(instruction.target))
            self._after = place
        else:
            name = getattr(instruction.target, "__name__", instruction.target) or "the output"
            place = f"{name!s} after {self._after}"
        tensors = list(tensors_of(value))
        self.prints.append(print_of(f"the output of {place}", tensors))
        self._outputs += [(place, one) for one in tensors if one.requires_grad]
        return value


def run_stages(tools: StageTools, samples: Any) -> Crossing | None:
    """Run all stages on rank 0; None after an error, which the first step will raise.

    Args:
        tools: of this process.
        samples: see ``rank_consistency.samples_of``.
    """
    crossing = Crossing(batch=batch_of(samples))
    stages = range(len(tools.partition.parts))
    trials = [_StageTrial(stage, tools, crossing) for stage in stages]
    with modes_of(tools.model, training=True), torch.enable_grad(), _untouched(tools):
        try:
            for trial in trials:
                trial.go_forward()
            for trial in reversed(trials):
                for number, gradients in trial.go_backward().items():
                    crossing.gradients.setdefault(number, []).append(gradients)
        except Exception:  # a model may raise any
            return None
        finally:
            for trial in trials:
                trial.close()
    crossing.prints = [trial.prints for trial in trials]
    return crossing


def check_stages_agree(worker: Worker, control: Control, crossing: Crossing | None) -> None:
    """Compare what all ranks compute in their stages; every rank calls it, in training mode.

    Args:
        worker: of this rank.
        control: its line to the others.
        crossing: on rank 0, the result of ``run_stages``.

    Raises:
        ModelError: on rank 0; a rank differs from it.
    """
    crossing = control.broadcast(crossing)
    passes, pipeline = worker.passes, worker.plan.pipeline
    if crossing is None:
        return
    assert isinstance(passes, StagePasses)
    assert pipeline is not None
    tools = passes.tools()
    own = [
        (number, _prints(_StageTrial(number, tools, crossing), tools))
        for number, stage in enumerate(pipeline.stages)
        if worker.rank in stage.ranks
    ]
    for rank, stages in enumerate(control.gather(own) or ()):
        is_remote = rank not in worker.plan.ranks_of_host(0)
        for stage, prints in stages:
            expected = crossing.prints[stage]
            place = first_difference(expected, prints, is_like if is_remote else is_same)
            if place is not None:
                raise unlike(rank, 0, place, is_exact=not is_remote)


def _prints(trial: _StageTrial, tools: StageTools) -> Sequence[Print]:
    """The fingerprints of a stage, up to an error, which the first step will raise."""
    with _untouched(tools), closing(trial), suppress(Exception):  # a model may raise any
        trial.go_forward()
        trial.go_backward()
    return trial.prints


@contextmanager
def _untouched(tools: StageTools) -> Iterator[None]:
    """After the block the model, the loss and the random streams are as before."""
    with left_alone(tools.model, *tools.loss.user_losses()), empty_memory_filled():
        yield
