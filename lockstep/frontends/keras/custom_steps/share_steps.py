"""Custom steps in data parallelism: each rank runs the step on its part of the batch.

Calls that concern all samples are joint. The ranks agree on the call; then gradients are summed and
every rank updates its slice, or every rank updates the metric with the values of all parts, or one
rank assigns the weight. Ranks with an empty part take part in these calls. So a metric has the
value of the whole batch on every rank, and steps that branch on it branch alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from keras import tree

from lockstep.data.map_style.sources import Source
from lockstep.errors import ModelError
from lockstep.frontends.keras.custom_steps.custom_step import CustomSteps, data_of
from lockstep.frontends.keras.custom_steps.step_calls import StepCalls
from lockstep.frontends.keras.custom_steps.step_trial import try_step
from lockstep.frontends.keras.model import KerasModel
from lockstep.parallel.batch_run import Run
from lockstep.parallel.data_parallel.model_passes import ModelPasses
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.independence.split_trial import is_tried
from lockstep.parallel.worker import Worker

# Kinds of calls that ranks agree on.
_IDLE, _APPLY, _UPDATE, _ASSIGN, _END, _END_WITH_RESULTS = range(6)


class ShareSteps(StepCalls):
    """Runs custom steps.

    Args:
        module: the model.
        custom: what is known of its steps.
        worker: of this rank.
        control: to the other ranks.
    """

    def __init__(
        self, module: KerasModel, custom: CustomSteps, worker: Worker, control: Control
    ) -> None:
        if worker.rank != 0:  # where the script's own model is
            vars(module.model).update(custom.compiled)
        super().__init__(module)
        self._custom = custom
        self._worker = worker
        self._control = control
        self._names = [*module.variables]
        self._variables = [*module.variables.values()]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._trained = worker.trained_names
        self._step = 0

    def run(self, name: str, source: Source, indices: torch.Tensor, step: int | None) -> Any:
        """Run a step on the batch at ``indices``; returns its logs on rank 0."""
        worker = self._worker
        passes = worker.passes
        assert isinstance(passes, ModelPasses)
        self._run = run = Run(source, indices, worker.plan.num_shares, step=step)
        self._step = step or 0
        passes.begin(run)
        start, stop = run.bounds[worker.rank]
        self._size = stop - start
        if not self._size:
            return self._follow_calls()
        with passes.on_share(run, worker.rank, self._loss_fraction) as batch:
            if is_tried(step) and run.num_filled > 1:
                try_step(self.module, name, batch, self._custom)
            with torch.set_grad_enabled(step is not None), self.intercepted():
                logs = getattr(self.module.model, name)(data_of(batch)) or {}
        return self._join_logs(logs)

    @property
    def _loss_fraction(self) -> float:
        """The part of the batch's loss that a mean over this rank's samples makes."""
        are_sums = any(kind == "apply" for kind, _ in self._custom.sums)
        return 1.0 if are_sums else self._size / self._run.num_samples

    # --- agreeing --------------------------------------------------------------------------------

    def _agree_on_call(self, kind: int, number: int = 0) -> tuple[int, int]:
        """Wait for all ranks; returns the kind and number of the call that those with samples make.

        Raises:
            ModelError: on all ranks, if they make different calls.
        """
        board = self._worker.board
        if board is None:
            return kind, number
        calls = {(int(one), int(other)) for one, other in board.all_gather([kind, number])}
        board.barrier()  # all have read it
        calls.discard((_IDLE, 0))
        if {_END, _END_WITH_RESULTS} == {one for one, _ in calls}:
            return _END, 0
        if len(calls) > 1:
            raise ModelError(
                "All parts of a batch must apply optimizers and update metrics in the same order.",
                received=f"another order on some devices, in step {self._step}",
                fix="Let a step branch on what is the same for all samples, such as counts of "
                "steps or values of metrics, and not on the samples.",
            )
        (found,) = calls
        return found

    def _follow_calls(self) -> Any:
        """Take part in the calls of the other ranks' step: this rank has no samples."""
        while True:
            kind, number = self._agree_on_call(_IDLE)
            if kind == _APPLY:
                self._update_weights(number, [None] * len(self._trained))
            elif kind == _UPDATE:
                self._update_metric(number, None)
            elif kind == _ASSIGN:
                self._worker.barrier()
            else:
                return self._gather_logs(None) if kind == _END else None

    # --- what steps do ---------------------------------------------------------------------------

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        turn = self._custom.number_of(optimizer)
        self._agree_on_call(_APPLY, turn)
        part = 1.0 if ("apply", turn) in self._custom.sums else self._size / self._run.num_samples
        part /= optimizer.loss_scale_factor or 1.0
        of = {
            self.name_of(variable): gradient
            for variable, gradient in zip(variables, gradients, strict=True)
        }
        if part != 1.0:
            of = dict(zip(of, torch._foreach_mul([*of.values()], part), strict=True))
        self._update_weights(turn, [of.get(name) for name in self._trained])

    def _update_weights(self, turn: int, gradients: Sequence[torch.Tensor | None]) -> None:
        parameters = list(self.module.parameters())
        kept = [parameter.grad for parameter in parameters]
        self._worker.exchange.expect(self._worker.plan.num_shares)  # a step may update again
        self._worker.update(gradients, self._step, turn)
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient

    def update(self, number: int, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        self._agree_on_call(_UPDATE, number)
        self._update_metric(number, (list(args), dict(named)))

    def _update_metric(self, number: int, given: Any) -> None:
        """Update a metric with the arguments of all ranks; None from those without samples."""
        if self._control.num_ranks > 1:
            given = given and tree.map_structure(_detached, given)
            is_sum = ("metric", number) in self._custom.sums
            given = self._gather_arguments(given, is_sum=is_sum)
        args, named = given
        with torch.no_grad():
            self.metrics[number].update_state(*args, **named)

    def assign(self, name: str, variable: Any, value: torch.Tensor) -> None:
        """Assign on the first of the ranks that share the memory, after all have reached it."""
        self._agree_on_call(_ASSIGN, self._numbers[name])
        domain = next(one for one in self._worker.plan.domains if self._worker.rank in one)
        if self._worker.rank == domain[0]:
            variable._direct_assign(value)
        self._worker.barrier()

    # --- joining ---------------------------------------------------------------------------------

    def _gather_arguments(self, given: Any, *, is_sum: bool) -> Any:
        """The arguments of all ranks, on every rank, as for all samples at once."""
        gathered = self._control.gather((self._size, given))
        joined = None
        if gathered:
            sizes, parts = zip(*(one for one in gathered if one[0]), strict=True)
            joined = tree.map_structure(
                lambda *values: _join_parts(values, sizes, is_sum=is_sum), *parts
            )
        return self._control.broadcast(joined)

    def _join_logs(self, logs: Mapping[str, Any]) -> Any:
        are_results = all(map(self.is_result, logs.values()))
        kind, _ = self._agree_on_call(_END_WITH_RESULTS if are_results else _END)
        return logs if kind == _END_WITH_RESULTS else self._gather_logs(logs)

    def _gather_logs(self, logs: Mapping[str, Any] | None) -> Any:
        """The logs of all ranks, on rank 0, which has the results of metrics already."""
        own = logs and {
            name: _detached(value) for name, value in logs.items() if not self.is_result(value)
        }
        gathered = self._control.gather((self._size, own))
        if not gathered:
            return None
        sizes, parts = zip(*(one for one in gathered if one[0]), strict=True)
        return {
            **(logs or {}),
            **{
                name: _join_parts(
                    [part[name] for part in parts], sizes, is_sum=("log", name) in self._custom.sums
                )
                for name in parts[0]
            },
        }


def _detached(value: Any) -> Any:
    """A value without its graph, to be sent to another rank."""
    value = getattr(value, "value", value) if hasattr(value, "assign") else value
    return value.detach() if isinstance(value, torch.Tensor) else value


def _join_parts(values: Sequence[Any], sizes: Sequence[int], *, is_sum: bool) -> Any:
    """The value of a batch from those of its parts: rows are joined, numbers added or averaged."""
    first = values[0]
    if first is None or isinstance(first, str | bool):
        return first
    dtype = torch.float64 if isinstance(first, float) else None  # a number keeps its digits
    tensors = [torch.as_tensor(value, dtype=dtype) for value in values]
    rows = {len(one) / size if one.dim() else 0.0 for one, size in zip(tensors, sizes, strict=True)}
    if len(rows) == 1 and rows.pop() >= 1:
        return torch.cat(tensors)
    if not tensors[0].is_floating_point():
        return _join_integers(values, sizes)
    if is_sum:
        return sum(tensors[1:], tensors[0])
    total = sum(sizes)
    return sum(size / total * tensor for size, tensor in zip(sizes, tensors, strict=True))


def _join_integers(values: Sequence[Any], sizes: Iterable[int]) -> Any:
    """The sum of numbers of samples; any other integer must be the same in all parts.

    Raises:
        ModelError: it is not.
    """
    counts: list[Any] = [torch.as_tensor(value).tolist() for value in values]
    if counts == list(sizes):
        return sum(values)
    if any(count != counts[0] for count in counts):
        raise ModelError(
            "Integers that a step passes to a metric or returns must count the samples, or be the "
            "same for all parts of a batch.",
            received=f"{counts} for the parts of a batch",
            fix="Give metrics the samples' own values, or means.",
        )
    return values[0]
