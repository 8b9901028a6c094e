"""A share of a batch and its halves, run alike: does it matter what else is in a share?

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

# From here on, every power of two is a step that is tried: half a percent of the time at most.
_FIRST_LATER_STEP = 256

# The function, its limits, and what was drawn.
_Draw = tuple[Any, tuple[float, ...], torch.Tensor]

_T = TypeVar("_T")


def is_tried(step: int | None) -> bool:
    """Whether a training step is one of those on which the loss is tried."""
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
    """What a function makes of some samples and of both halves; None if that says nothing.

    Args:
        model: which it runs; its BatchNorm layers are in evaluation mode.
        function: of samples.
        batch: the samples; a single one is joined by another.
        state: of the model, from which each time it starts.
        training: the mode of the model; None leaves it.
        draws_by_row: each half gets its rows of what is drawn for all; else every draw has one
            value throughout, and it is all the same which row is whose.
    """
    run = partial(
        _on_halves, model, function, state=state, training=training, draws_by_row=draws_by_row
    )
    if batch.num_samples > 1:
        return run(batch)
    try:
        return run(with_another(batch))
    except Exception:  # of a model that has not every order
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
    """Bring a model back to a state; whether it then looks at no statistics of the batch."""
    state.restore()
    if training is not None:
        model.train(training)
    if isinstance(model, FrontEndModel):
        model.train(model.training)  # what a front end calls it puts in the mode of all
    else:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
    return not BatchNorms(model).use_batch_statistics  # of layers that keep none


def halves(batch: Batch) -> tuple[slice, slice]:
    """The rows of both halves."""
    middle = batch.num_samples // 2
    return slice(0, middle), slice(middle, batch.num_samples)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some samples of a batch."""
    return _mapped(batch, lambda one: one[rows], rows.stop - rows.start)


def repeated(batch: Batch, numbers: Sequence[int]) -> Batch:
    """Samples of a batch, by their numbers, which may be named several times."""
    return _mapped(batch, lambda one: one[[*numbers]], len(numbers))


def with_another(batch: Batch) -> Batch:
    """A sample, and one that is another wherever there is an order to turn around."""
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
        fit: whether the parts have drawn what the whole had, but for the number of samples.
    """

    @property
    def any(self) -> bool:
        """Whether anything was drawn for the whole."""
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
        """Else torch imports torch.compile's machinery, to keep it away: a second."""
        return False

    @contextmanager
    def of(self, rows: slice) -> Iterator[None]:
        """Around the pass over some samples."""
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
            # Limits may be numbers of samples: those of another number are other draws.
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
        """What was drawn for all samples in the place of the next draw."""
        return self._rest.pop(0) if self._rest else (None, None, None)

    def _rows_of(self, drawn: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """A part's rows of what the whole has drawn; None where it has none."""
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
    """Tensors beside the result that a function has drawn into, such as RReLU's for backward."""
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
