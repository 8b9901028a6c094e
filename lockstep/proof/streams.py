"""Draws random numbers for a whole batch that equal those of its shares.

Lockstep seeds torch's generator for every share of every step, so dropout's draws depend on how the
batch is divided. The reference runs the whole batch. ``ShareStreams`` intercepts torch's random
operations: a draw with a dim for the samples is made share by share, each with the share's own
generator state and shape, so the bits are the share's own.

The size of a dim does not always show that it is the samples' (an LSTM draws its dropout with time
first). ``probe_draws`` runs the forward pass once with one sample less: the dim that shrinks is the
samples'.

The shares' states are keyed by the state of torch's global generator, which advances with every
draw. Code that saves and restores the global state (``torch.utils.checkpoint``) therefore restores
the shares' states, and code that seeds it seeds all of them.

Not covered: draws from a generator of the model's own, and draws without a dim for the samples.
Both are noted by name. In a dim with several rows per sample, the rows of one sample must be
neighbours.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.order import set_torch_streams, torch_streams

State = torch.Tensor  # of torch's generators


@dataclass(frozen=True)
class Draw:
    """A random operation and its shape."""

    operation: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """The draws of a forward pass with another number of samples."""

    num_samples: int
    draws: Sequence[Draw]


class ShareStreams(TorchDispatchMode):
    """While active, makes random draws share by share.

    Args:
        bounds: rows ``[start, stop)`` of each share.
        states: the generator state at the start of each share.
        probe: the draws with another number of samples; None if that pass failed.
    """

    def __init__(
        self, bounds: Sequence[tuple[int, int]], states: list[State], probe: Probe | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bounds = bounds
        self._num_samples = bounds[-1][1]
        self._probe = probe
        self._num_draws = 0
        self._states: dict[bytes, list[State]] = {_key(torch_streams()): states}
        self._dims: dict[tuple[bytes, Draw], int | None] = {}
        self.notes: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = _Call(func, args, kwargs or {})
        if not call.may_draw:
            return call.run()
        if call.has_own_generator:
            self._note(f"{call.name} draws from a generator of the model's own")
            return call.run()
        before = torch_streams()
        if not call.draws():
            return call.run()
        # If the forward pass has seeded the generator, so would every share.
        states = self._states.get(_key(before), [before] * len(self._bounds))
        dim = self._dim_of_samples(_key(before), Draw(call.name, call.shape))
        result, states = self._draw(call, dim, states)
        set_torch_streams(before)
        torch.rand(())  # advances the global state, so that the next draw has a key of its own
        self._states[_key(torch_streams())] = states
        return result

    def _draw(self, call: "_Call", dim: int | None, states: list[State]) -> tuple[Any, list[State]]:
        """The joined result of the shares' draws, and the shares' states after it."""
        if dim is None:
            self._note(f"{call.name} draws numbers of shape {call.shape}, none per sample")
            parts = [_from_state(state, call.run) for state in states]
            return parts[0][0], [state for _, state in parts]
        rows = call.shape[dim] // self._num_samples
        pieces = [
            call.cut(dim, start * rows, (stop - start) * rows) for start, stop in self._bounds
        ]
        parts = [_from_state(state, piece.run) for state, piece in zip(states, pieces, strict=True)]
        result = call.join(dim, pieces, [part for part, _ in parts])
        return result, [state for _, state in parts]

    def _dim_of_samples(self, moment: bytes, draw: Draw) -> int | None:
        """The dim to divide; the same for a draw that is recomputed from the same state."""
        number = self._num_draws
        self._num_draws += 1
        if (moment, draw) not in self._dims:
            self._dims[moment, draw] = self._find_dim(draw, number)
        return self._dims[moment, draw]

    def _find_dim(self, draw: Draw, number: int) -> int | None:
        fitting = [
            dim for dim, size in enumerate(draw.shape) if size and size % self._num_samples == 0
        ]
        probe = self._probe
        if probe is not None:
            if number >= len(probe.draws):  # it draws once for each sample
                return None
            other = probe.draws[number]
            if other.operation == draw.operation and len(other.shape) == len(draw.shape):
                fitting = [
                    dim
                    for dim in fitting
                    if other.shape[dim] * self._num_samples == draw.shape[dim] * probe.num_samples
                ]
        return fitting[0] if fitting else None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def probe_draws(num_samples: int, forward: Callable[[], object]) -> Probe | None:
    """The draws of a forward pass over ``num_samples``; None if it fails, or draws nothing."""
    recorder = _Recorder()
    try:
        with _kept_state(), torch.no_grad(), recorder:
            forward()
    except Exception:
        # One sample less may be too few for a BatchNorm or a reshape: go by sizes then.
        return None
    return Probe(num_samples, recorder.draws) if recorder.draws else None


class _Recorder(TorchDispatchMode):
    """Records random draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = _Call(func, args, kwargs or {})
        if call.may_draw and not call.has_own_generator and call.draws():
            self.draws.append(Draw(call.name, call.shape))
        return call.run()


@dataclass(frozen=True)
class _Call:
    """One call of a torch operation."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        return str(self.func)

    @property
    def may_draw(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def has_own_generator(self) -> bool:
        generator = self.kwargs.get("generator")
        return generator is not None and generator is not torch.default_generator

    def draws(self) -> bool:
        """True if the call draws from the global generator; changes nothing."""
        before = torch_streams()
        self._on(tuple(map(_clone, self.args)), self._cloned_kwargs()).run()
        drew = not torch.equal(before, torch_streams())
        set_torch_streams(before)
        return drew

    @property
    def shape(self) -> tuple[int, ...]:
        """The broadcast shape of its tensors, or its size argument."""
        tensors = [arg for arg in self.args if isinstance(arg, torch.Tensor)]
        if not tensors:
            return self._size()[1]
        try:
            return tuple(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
        except RuntimeError:
            return tuple(tensors[0].shape)

    def _size(self) -> tuple[int | None, tuple[int, ...]]:
        """The index of the size argument, and the size."""
        for index, arg in enumerate(self.args):
            if isinstance(arg, list | tuple):
                return index, tuple(arg)
        return None, ()

    def cut(self, dim: int, start: int, length: int) -> "_Call":
        """The same call on copies of some rows."""
        shape = self.shape
        if not any(isinstance(arg, torch.Tensor) for arg in self.args):
            index, size = self._size()
            shorter = [*size[:dim], length, *size[dim + 1 :]]
            return self._on(
                tuple(shorter if at == index else arg for at, arg in enumerate(self.args)),
                self.kwargs,
            )
        return self._on(
            tuple(_rows(arg, shape, dim, start, length) for arg in self.args), self.kwargs
        )

    def join(self, dim: int, pieces: "Sequence[_Call]", results: list[Any]) -> Any:
        """Join the results of the cut calls; copy what they wrote into this call's arguments."""
        written = [
            index
            for index, argument in enumerate(self.func._schema.arguments)
            if argument.is_write and index < len(self.args)
        ]
        for index in written:
            self.args[index].copy_(torch.cat([piece.args[index] for piece in pieces], dim))
        if self.func._schema.name.endswith("_"):
            return self.args[0]
        if isinstance(results[0], tuple):
            return tuple(torch.cat(parts, dim) for parts in zip(*results, strict=True))
        return torch.cat(results, dim)

    def _on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        return _Call(self.func, args, kwargs)

    def _cloned_kwargs(self) -> dict[str, Any]:
        return {key: _clone(value) for key, value in self.kwargs.items()}


def _rows(arg: Any, shape: tuple[int, ...], dim: int, start: int, length: int) -> Any:
    """A share's rows of an argument; a broadcast argument whole."""
    if not isinstance(arg, torch.Tensor):
        return arg
    own_dim = dim - (len(shape) - arg.dim())
    if own_dim < 0 or arg.shape[own_dim] != shape[dim]:
        return arg.clone()
    return arg.narrow(own_dim, start, length).clone()


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _from_state(state: State, run: Callable[[], Any]) -> tuple[Any, State]:
    """Run with torch's generator in this state; return the result and the state after it."""
    set_torch_streams(state)
    return run(), torch_streams()


@contextmanager
def _kept_state() -> Iterator[None]:
    before = torch_streams()
    try:
        yield
    finally:
        set_torch_streams(before)


def _key(state: State) -> bytes:
    return state.numpy().tobytes()
