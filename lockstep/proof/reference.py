"""The reference: a plain PyTorch loop over whole batches, in float64, on one device.

Lockstep promises that dividing the work changes nothing, so the reference does not divide it, and
shares no code with modules that do. It imports only ``data`` (the samples and their order) and
``plan.shares`` (which random numbers belong to which sample); import-linter checks that.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn, optim

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.map_style.sources import Batch, Source
from lockstep.data.order import seed_streams, share_seed, torch_streams
from lockstep.data.own_loss import OwnLoss
from lockstep.data.trees import concatenate, map_tensors
from lockstep.plan.shares import num_filled_shares, share_bounds
from lockstep.proof.batch_loss import batch_loss, own_loss, returned_loss, weighted_losses
from lockstep.proof.streams import Probe, ShareStreams, probe_draws

Gradients = dict[str, torch.Tensor | None]

# A source, and the indices of a batch's samples in it.
DataOfBatch = tuple[Source, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Record:
    """The results of a step of the reference.

    Attributes:
        step: the step's number, from 0.
        loss: of the whole batch; None if the batch's weight is 0 and no update was made.
        gradients: of every trainable parameter by name; None for an unused one.
        state: the tensors of the model's ``state_dict``, a tied one under each of its names.
        buffers: the names of ``state`` that are buffers.
        parameters: the first name of each parameter.
        moved_buffers: the first name of each buffer that training has changed so far.
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
    """A plain training loop, one step per call.

    Args:
        model: in float64; it is trained in place.
        loss: see ``batch_loss``.
        optimizer: over the model's parameters.
        batches: the data: a source and the indices of each batch's samples.
        seed: of all random streams.
        loss_weights: of several losses.
        shares: the shares of each batch to train on; None for all.
        train_step: the user's own, instead of the loss.
        dims: the dims of the samples in the tensors that the user's code takes.

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
        if not model.training:  # in train mode, submodules that the user put in eval mode stay so
            model.train()
        # Shapes do not depend on weights, so one copy serves all probes, even if they change it.
        self._probe_copy: tuple[nn.Module, Any] = copy.deepcopy((model, loss))

    def step(
        self,
        num_shares: int,
        before_update: Callable[[dict[str, nn.Parameter]], None] | None = None,
    ) -> Record:
        """Train on the next batch.

        Args:
            num_shares: into how many shares Lockstep divides a batch; only the random numbers of
                each sample depend on it.
            before_update: called with the trainable parameters between backward and update.
        """
        number, data = next(self._batches)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._pass(number, data, num_shares)
        if loss is not None:
            if before_update is not None:
                before_update(dict(self._trainable()))
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
        bounds: Sequence[tuple[int, int]],
        first_share: int,
    ) -> tuple[Batch, list[torch.Tensor]]:
        """Read the batch; return it, and each share's generator state after its samples.

        It is read share by share, because reading may augment samples at random.
        """
        parts, states = [], []
        source, indices = data
        for share, (start, stop) in enumerate(bounds, first_share):
            seed_streams(share_seed(self._seed, number, share))
            parts.append(source.read(indices[start:stop], torch.float64))
            states.append(torch_streams())
        return self._moved(_joined(parts)), states

    def _probe(self, batch: Batch) -> Probe | None:
        """The random draws of a forward pass with one sample less."""
        fewer = _first(batch, batch.num_samples - 1)
        return probe_draws(fewer.num_samples, lambda: self._loss_of(*self._probe_copy, fewer))

    def _loss_of(self, model: Callable[..., Any], loss: Any, batch: Batch) -> torch.Tensor | None:
        batch = replace(
            batch,
            inputs=self._dims.given_inputs(batch.inputs, torch.float64),
            targets=self._dims.given_targets(batch.targets),
        )
        if self._train_step is not None:
            return returned_loss(self._train_step(model, batch.as_given))
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

    # --- results ---------------------------------------------------------------------------------

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def record(self) -> Record:
        """The results of the last step."""
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
    """A dense copy of a tensor; any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to_dense() if value.is_sparse else value.detach().clone()
    return value
