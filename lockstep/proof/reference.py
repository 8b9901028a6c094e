"""The reference: a plain PyTorch loop over whole batches, in float64, on one device.

What Lockstep promises is that dividing the work changes nothing, so the thing to compare with must
not divide it, and must share no code with what does. Of Lockstep it sees ``data`` (the samples and
their order) and ``plan.shares`` (which random numbers belong to which sample), and nothing else:
import-linter holds it to that.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn, optim

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.map_style.sources import Batch, Source
from lockstep.data.model_loss import OwnLoss
from lockstep.data.order import seed_streams, share_seed, torch_streams
from lockstep.data.trees import concatenate, map_tensors
from lockstep.plan.shares import num_filled_shares, share_bounds
from lockstep.proof.batch_loss import batch_loss, own_loss, returned_loss, weighted_losses
from lockstep.proof.streams import Probe, ShareStreams, probe_draws

Gradients = dict[str, torch.Tensor | None]

# Where a batch's samples are, and which of them it has, in order.
DataOfBatch = tuple[Source, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything a step of the reference left behind.

    Attributes:
        step: the step's number, from 0.
        loss: of the whole batch; None where the batch weighs nothing and no update was made.
        gradients: of every trainable parameter by name; None where it was not used.
        state: the tensors of the model's ``state_dict``, a tied one under each of its names.
        buffers: which names of ``state`` are buffers.
        parameters: the names of the parameters, each by its first.
        moved_buffers: the buffers that training has changed so far, each by its first name.
        slots: of the optimizer, by parameter name.
    """

    step: int
    loss: float | None
    gradients: Gradients
    state: dict[str, torch.Tensor]
    buffers: frozenset[str]
    parameters: frozenset[str]
    moved_buffers: frozenset[str]
    slots: dict[str, dict[str, Any]]


class Reference:
    """Trains step by step.

    Args:
        model: in float64; it is trained in place.
        loss: see ``batch_loss``.
        optimizer: over the model's parameters.
        batches: the data: sources, and which of their samples make a batch.
        seed: of all random streams.
        loss_weights: of several losses.
        shares: of each batch, those that it trains on; None for all.
        train_step: the user's own, in place of model and loss.
        dims: where the samples are in what the user's code takes.

    Attributes:
        model: the model.
        optimizer: the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        optimizer: optim.Optimizer,
        batches: Iterable[DataOfBatch],
        *,
        seed: int,
        loss_weights: Any = None,
        shares: range | None = None,
        train_step: Any = None,
        dims: BatchDims = SAMPLES_FIRST,
    ) -> None:
        self.notes: list[str] = []
        self.model = model
        self.optimizer = optimizer
        self._shares = shares
        self._step = -1
        self._last_loss: float | None = None
        self._loss = loss
        self._loss_weights = loss_weights
        self._train_step = train_step
        self._dims = dims
        self._seed = seed
        self._batches = enumerate(batches)
        self._first_buffers = {name: value.clone() for name, value in model.named_buffers()}
        if not model.training:  # else modules that the user has put in evaluation mode stay there
            model.train()
        # Shapes do not depend on weights, so one copy serves all probes, whatever they do to it.
        self._guinea_pig: tuple[nn.Module, Any] = copy.deepcopy((model, loss))

    def step(
        self, num_shares: int, settle: Callable[[dict[str, nn.Parameter]], None] | None = None
    ) -> Record:
        """Train on the next batch.

        Args:
            num_shares: into how many shares Lockstep divides a batch: it decides which random
                numbers a sample gets, and nothing else.
            settle: called with the trainable parameters between backward and update.
        """
        number, data = next(self._batches)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._pass(number, data, num_shares)
        if loss is not None:
            if settle is not None:
                settle(dict(self._trainable()))
            self.optimizer.step()
        self._step, self._last_loss = number, None if loss is None else loss.item()
        return self.record()

    # --- forward and backward --------------------------------------------------------------------

    def _pass(self, number: int, data: DataOfBatch, num_shares: int) -> torch.Tensor | None:
        num_samples = len(data[1])
        bounds = share_bounds(num_samples, num_shares)
        bounds = bounds[: num_filled_shares(num_samples, num_shares)]
        first_share = 0
        if self._shares is not None:
            first_share = self._shares.start
            bounds = bounds[first_share : self._shares.stop]
        if not bounds:
            return None
        batch, states = self._read(number, data, bounds, first_share)
        others = _other_streams()
        streams: ShareStreams | None = None
        scope: AbstractContextManager[Any] = nullcontext()
        if len(bounds) > 1:
            begin = bounds[0][0]
            rows = [(start - begin, stop - begin) for start, stop in bounds]
            scope = streams = ShareStreams(rows, states, self._probe(batch))
        with scope:
            loss = self._loss_of(self.model, self._loss, batch)
            if loss is not None:
                loss.backward()
        if streams is not None:
            self._note(streams.notes)
            if others != _other_streams():
                self._note(["the model draws from Python's or NumPy's random numbers"])
        return None if loss is None else loss.detach()

    def _read(
        self,
        number: int,
        data: DataOfBatch,
        bounds: list[tuple[int, int]],
        first_share: int,
    ) -> tuple[Batch, list[torch.Tensor]]:
        """The batch, and each share's generator state once its samples are read.

        Read share by share, because data may be augmented at random while it is read.
        """
        parts, states = [], []
        source, indices = data
        for share, (start, stop) in enumerate(bounds, first_share):
            seed_streams(share_seed(self._seed, number, share))
            parts.append(source.read(indices[start:stop], torch.float64))
            states.append(torch_streams())
        return self._moved(_joined(parts)), states

    def _probe(self, batch: Batch) -> Probe | None:
        """The draws for one sample less."""
        fewer = _first(batch, batch.num_samples - 1)
        return probe_draws(fewer.num_samples, lambda: self._loss_of(*self._guinea_pig, fewer))

    def _loss_of(self, model: Callable[..., Any], loss: Any, batch: Batch) -> torch.Tensor | None:
        batch = replace(
            batch,
            inputs=self._dims.given_inputs(batch.inputs, torch.float64),
            targets=self._dims.given_targets(batch.targets),
        )
        if self._train_step is not None:
            return returned_loss(self._train_step(model, _as_given(batch)))
        inputs = batch.inputs
        if isinstance(inputs, tuple):
            output = model(*inputs)
        elif isinstance(inputs, dict):
            output = model(**inputs)
        else:
            output = model(inputs)
        if isinstance(loss, OwnLoss):
            return own_loss(loss, output, inputs)
        if isinstance(loss, Mapping | list | tuple):
            return weighted_losses(loss, self._loss_weights, output, batch)
        return batch_loss(loss, output, batch.targets, batch.sample_weight)

    def _moved(self, batch: Batch) -> Batch:
        device = next(self.model.parameters()).device
        return batch if device.type == "cpu" else _mapped(lambda part: part.to(device), batch)

    def _note(self, texts: list[str]) -> None:
        self.notes += [text for text in texts if text not in self.notes]

    # --- what is left behind ---------------------------------------------------------------------

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def record(self) -> Record:
        """What the last step has left behind, as it is now."""
        return Record(
            step=self._step,
            loss=self._last_loss,
            gradients={name: _clone(parameter.grad) for name, parameter in self._trainable()},
            state={
                name: _clone(value)
                for name, value in self.model.state_dict().items()
                if isinstance(value, torch.Tensor)
            },
            buffers=frozenset(dict(self.model.named_buffers(remove_duplicate=False))),
            parameters=frozenset(dict(self.model.named_parameters())),
            moved_buffers=frozenset(
                name
                for name, value in self.model.named_buffers()
                if name not in self._first_buffers or not value.equal(self._first_buffers[name])
            ),
            slots={
                name: {slot: _clone(value) for slot, value in slots.items()}
                for name, parameter in self._trainable()
                if (slots := self.optimizer.state.get(parameter))
            },
        )


def _as_given(batch: Batch) -> Any:
    """As the user's data is."""
    if batch.sample_weight is not None:
        return batch.inputs, batch.targets, batch.sample_weight
    return batch.inputs if batch.targets is None else (batch.inputs, batch.targets)


def _joined(parts: list[Batch]) -> Batch:
    weights = [part.sample_weight for part in parts if part.sample_weight is not None]
    return Batch(
        inputs=concatenate([part.inputs for part in parts]),
        targets=concatenate([part.targets for part in parts]),
        sample_weight=torch.cat(weights) if weights else None,
        num_samples=sum(part.num_samples for part in parts),
    )


def _first(batch: Batch, num_samples: int) -> Batch:
    return _mapped(lambda part: part[:num_samples], batch, num_samples)


def _mapped(
    function: Callable[[torch.Tensor], torch.Tensor], batch: Batch, num_samples: int | None = None
) -> Batch:
    return Batch(
        inputs=map_tensors(function, batch.inputs),
        targets=map_tensors(function, batch.targets),
        sample_weight=map_tensors(function, batch.sample_weight),
        num_samples=batch.num_samples if num_samples is None else num_samples,
    )


def _other_streams() -> tuple[Any, ...]:
    """The states of Python's and NumPy's random streams."""
    numbers: dict[str, Any] = np.random.get_state(legacy=False)["state"]
    return numbers["key"].tobytes(), numbers["pos"], random.getstate()


def _clone(value: Any) -> Any:
    """A copy of a tensor, dense; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to_dense() if value.is_sparse else value.detach().clone()
    return value
