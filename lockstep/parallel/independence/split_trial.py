"""Runs a share of a batch and its halves alike, to test whether samples affect one another.

Random numbers are drawn once, for the whole share, and each half gets its rows. BatchNorm layers
are in evaluation mode: their statistics are of the whole batch in any case.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.capture.calls import has_drawn, host_streams, streams_differ, uncompiled
from lockstep.capture.layers import FrontEndModel
from lockstep.capture.state import ModelState
from lockstep.data.map_style.sources import Batch
from lockstep.data.order import torch_streams
from lockstep.data.trees import map_tensors
from lockstep.parallel.data_parallel.batch_norm import BatchNorms

# From here on, every power of two is a tested step: half a percent of the time at most.
_FIRST_LATER_STEP = 256

# A model that is not trained is tested on so many samples, in the first batch of a call.
NUM_INFERRED = 8

# The function, its limits, and the drawn values.
_Draw = tuple[Any, tuple[float, ...], torch.Tensor]

_T = TypeVar("_T")


def is_tried(step: int | None) -> bool:
    """True if the loss is tested in this training step."""
    if step is None:
        return False
    return step == 0 or (step >= _FIRST_LATER_STEP and step & (step - 1) == 0)


def on_halves(
    model: nn.Module,
    function: Callable[[Batch], _T],
    batch: Batch,
    state: ModelState,
    *,
    training: bool | None,
    draws_by_row: bool = True,
) -> list[_T] | None:
    """A function's results for some samples and for both halves; None if they do not compare.

    Args:
        model: the function runs it; its BatchNorm layers are in evaluation mode.
        function: of samples.
        batch: the samples; another one is added to a single one.
        state: of the model, restored before each run.
        training: the mode of the model; None leaves it.
        draws_by_row: each half gets its rows of the whole's random draws; else every draw has one
            value in all elements, which does not depend on rows.
    """
    run = partial(
        _on_halves, model, function, state=state, training=training, draws_by_row=draws_by_row
    )
    if batch.num_samples > 1:
        return run(batch)
    try:
        return run(with_another(batch))
    except Exception:  # the model does not accept every order
        return run(repeated(batch, [0, 0]))


def _on_halves(
    model: nn.Module,
    function: Callable[[Batch], _T],
    batch: Batch,
    *,
    state: ModelState,
    training: bool | None,
    draws_by_row: bool,
) -> list[_T] | None:
    draws = (Draws if draws_by_row else _EvenDraws)(batch.num_samples)
    found, draws_elsewhere = [], False
    for rows in (slice(0, batch.num_samples), *halves(batch)):
        if not begin_again(model, state, training):
            return None
        host = host_streams()
        with uncompiled(), draws.of(rows):
            found.append(function(rows_of(batch, rows)))
        draws_elsewhere |= streams_differ(host, host_streams())
    return found if draws.fit and not draws_elsewhere else None


def begin_again(model: nn.Module, state: ModelState, training: bool | None) -> bool:
    """Restore a model's state; returns True if it then uses no statistics of the batch."""
    state.restore()
    if training is not None:
        model.train(training)
    if isinstance(model, FrontEndModel):
        model.train(model.training)  # its front end sets the mode of all layers
    else:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
    return not BatchNorms(model).use_batch_statistics  # layers without running statistics


def halves(batch: Batch) -> tuple[slice, slice]:
    """The rows of both halves."""
    middle = batch.num_samples // 2
    return slice(0, middle), slice(middle, batch.num_samples)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some samples of a batch."""
    return _mapped(batch, lambda one: one[rows], rows.stop - rows.start)


def repeated(batch: Batch, numbers: Sequence[int]) -> Batch:
    """Samples of a batch by number; a number may occur several times."""
    return _mapped(batch, lambda one: one[[*numbers]], len(numbers))


def with_another(batch: Batch) -> Batch:
    """A sample and another one: its elements rolled along the last dim, if there is one."""
    return _mapped(
        batch, lambda one: torch.cat([one, one.roll(1, -1) if one.dim() > 1 else one]), 2
    )


def _mapped(
    batch: Batch, function: Callable[[torch.Tensor], torch.Tensor], num_samples: int
) -> Batch:
    return Batch(
        inputs=map_tensors(function, batch.inputs),
        targets=map_tensors(function, batch.targets),
        sample_weight=map_tensors(function, batch.sample_weight),
        num_samples=num_samples,
    )


class Draws(TorchDispatchMode):
    """Random draws of a batch, and the same ones, row by row, for parts of it.

    Args:
        num_samples: of the batch; the first pass runs over all of them.

    Attributes:
        fit: the parts have drawn the same as the whole, except for the number of samples.
    """

    @property
    def any(self) -> bool:
        """True if anything was drawn for the whole."""
        return bool(self._drawn)

    def __init__(self, num_samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fit = True
        self._num_samples = num_samples
        self._drawn: list[_Draw] = []
        self._rest: list[_Draw] | None = None
        self._rows = slice(0, num_samples)
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports torch.compile's modules to disable it, which takes a second."""
        return False

    @contextmanager
    def of(self, rows: slice) -> Iterator[None]:
        """Entered around the pass over some samples."""
        self._rows = rows
        try:
            with self:
                yield
            self.fit &= not self._rest
        finally:
            self._rest = list(self._drawn)
            for generator, state in self._generators.values():
                generator.set_state(state)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None:
            self._generators.setdefault(id(generator), (generator, generator.get_state()))
        stream = torch_streams()
        result = func(*args, **kwargs)
        if generator is None and not has_drawn(stream):  # attention without dropout
            return result
        if isinstance(result, torch.Tensor):
            # Limits may be numbers of samples: draws with other limits differ.
            limits = tuple(each for each in args if isinstance(each, int | float))
            for drawn in (*_written(func, args, result), result):
                self._note(func, limits, drawn)
        else:
            self.fit = False
        return result

    def _note(self, func: Any, limits: tuple[float, ...], result: torch.Tensor) -> None:
        if self._rest is None:
            self._drawn.append((func, limits, result.clone()))
            return
        *call, drawn = self._next()
        is_same = call == [func, limits]
        rows = self._rows_of(drawn, result.shape) if is_same and drawn is not None else None
        self.fit &= rows is not None
        if rows is not None:
            result.copy_(rows)

    def _next(self) -> tuple[Any, ...]:
        """The whole's draw in the place of the next draw."""
        return self._rest.pop(0) if self._rest else (None, None, None)

    def _rows_of(self, drawn: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """A part's rows of the whole's draw; None if it has none."""
        if drawn.shape == shape:
            return drawn
        if drawn.dim() != len(shape):
            return None
        others = [dim for dim, size in enumerate(shape) if drawn.shape[dim] != size]
        each, rest = divmod(drawn.shape[others[0]], self._num_samples)
        size = (self._rows.stop - self._rows.start) * each
        if len(others) > 1 or rest or shape[others[0]] != size:
            return None
        return drawn.narrow(others[0], self._rows.start * each, size)


def _written(func: Any, args: Sequence[Any], result: torch.Tensor) -> list[torch.Tensor]:
    """Tensors other than the result that a function draws into, such as RReLU's for backward."""
    return [
        arg
        for arg, described in zip(args, func._schema.arguments, strict=False)
        if described.alias_info is not None and described.alias_info.is_write and arg is not result
    ]


class _EvenDraws(Draws):
    """Random draws with one value each, the same for a batch and for parts of it."""

    def _note(self, func: Any, limits: tuple[float, ...], result: torch.Tensor) -> None:
        if self._rest is None:
            self._drawn.append((func, limits, result.reshape(-1)[:1].clone()))
        *call, drawn = self._drawn[-1] if self._rest is None else self._next()
        self.fit &= call == [func, limits] and drawn is not None
        if drawn is not None:
            result.copy_(drawn.expand_as(result))
