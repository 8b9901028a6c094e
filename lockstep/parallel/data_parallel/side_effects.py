"""Checks that a forward pass changes buffers once per batch, and parameters never.

Every share of a batch starts from the same buffers, and those after the first share are kept. One
pass over the whole batch gives the same buffers if they do not depend on samples (a count of calls,
the vectors of a power iteration). A moving average over a layer's inputs would be that of a part of
the samples, and a different one on every device: then the shares' buffers differ. BatchNorm's
statistics are exempt: they are computed from all shares (``parallel.data_parallel.batch_norm``).

Parameters are in memory that ranks share, and each share would change them again. A torchmetrics
metric within the model would count the shares of its own rank.
"""

import sys
import zlib
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from lockstep.comm.collectives.piece_memory import storage_key
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.errors import ModelError

# Marks of a buffer that no share of a rank has used, and of one that differs between its shares.
_UNUSED, _DIFFERENT = -1.0, -2.0


class SideEffects:
    """Checks a model after its shares, in steps 1, 2, 4, 8 and so on of a call.

    A single share may change the values of parameters, but not move them to other memory.

    Args:
        model: this rank's part of the model.
        free: names of buffers that may depend on the samples.
        is_shared: several ranks have the same parameters.

    Attributes:
        is_due: this step is checked.
        gathered: names of parameters that are gathered while the model runs: their values change.
    """

    gathered: Collection[str] = ()

    def __init__(self, model: nn.Module, free: Collection[str], *, is_shared: bool) -> None:
        self._model = model
        self._names = [name for name in _lasting(model) if name not in free]
        # Shortening the rows that a share looks up, only once, does not affect other shares.
        self._free = frozenset() if is_shared else _shortened(model)
        self._num_steps = 0
        self.is_due = self._is_compared = False
        self._first: dict[str, float] = {}
        self._marks: dict[str, float] = {}
        self._parameters: dict[str, object] = {}
        self._places: dict[str, object] = {}
        self._metrics = _metrics_of(model)
        self._updates: list[int] = []

    def begin(self, *, is_divided: bool) -> None:
        """Begin a training batch, of several shares or of one."""
        self._num_steps += 1
        self.is_due = not self._num_steps & (self._num_steps - 1)
        self._places = self._places_now() if self.is_due else {}
        self._is_compared = is_divided and self.is_due
        if self._is_compared:
            self._updates = [metric._update_count for metric in self._metrics.values()]
            self._parameters = self._looks()
            self._first = self._marks_now()
            self._marks = {}

    def note(self, names: Collection[str] | None = None) -> None:
        """Check after a share's forward pass through the layers with these buffers, or all.

        Raises:
            ModelError: a parameter has changed.
        """
        for name, place in self._places_now().items() if self._places else ():
            if place != self._places.get(name, place):
                raise _changes_parameter(name, ": it lies in other memory now (module.to, .data)")
        if self._is_compared:
            for name, look in self._looks().items():
                if look != self._parameters.get(name, look):
                    raise _changes_parameter(name)
            for name, mark in self._marks_now(names).items():
                is_same = self._marks.setdefault(name, mark) == mark
                self._marks[name] = mark if is_same else _DIFFERENT

    def settle(self, board: StatusBoard | None) -> None:
        """Check after the forward passes of all shares; every rank calls it.

        Raises:
            ModelError: on all ranks, with the first buffer that differs between shares, or with a
                metric that shares have updated.
        """
        if not self._is_compared:
            return
        if board is not None:
            for before, (name, metric) in zip(self._updates, self._metrics.items(), strict=True):
                if metric._update_count != before:
                    raise _counts_share(name)
        if not self._names:
            return
        changed = [name for name, mark in self._marks.items() if mark != self._first[name]]
        if not any(_gathered(board, float(len(changed)))):
            return
        for name in self._names:
            marks = {*_gathered(board, self._marks.get(name, _UNUSED))} - {_UNUSED}
            if len(marks) > 1 or _DIFFERENT in marks:
                raise depends_on_samples(name, "differs between shares of one batch")

    def _places_now(self) -> dict[str, object]:
        """Where trained parameters lie: the optimizer updates this memory."""
        return {
            name: _place(one, is_gathered=name in self.gathered)
            for name, one in self._model.named_parameters()
            if one.requires_grad
        }

    def _looks(self) -> dict[str, object]:
        return {
            name: _look(parameter, is_gathered=name in self.gathered)
            for name, parameter in self._model.named_parameters()
            if not (parameter.is_meta or name in self._free)
        }

    def _marks_now(self, names: Collection[str] | None = None) -> dict[str, float]:
        buffers = dict(self._model.named_buffers())
        return {
            name: _mark(buffers[name])
            for name in self._names
            if name in buffers and (names is None or name in names)
        }


def buffer_marks(model: nn.Module) -> dict[str, float]:
    """Checksums of a model's buffers by name, without its caches."""
    buffers = dict(model.named_buffers())
    return {name: _mark(buffers[name]) for name in _lasting(model)}


def depends_on_samples(name: str, how: str) -> ModelError:
    """The error of a buffer that a forward pass sets to what depends on the samples."""
    return ModelError(
        "A layer's buffer must not depend on the samples: the layer sees only a part of each "
        "batch. Only torch's BatchNorm collects statistics over all samples.",
        received=f"buffer {name!r}, which {how}",
        fix="Use one device, remove the buffer (for InstanceNorm: track_running_stats=False), or "
        "give each device its own with register_buffer(..., persistent=False).",
    )


def _lasting(model: nn.Module) -> list[str]:
    """Names of buffers; those that are not persistent are caches."""
    kept = model.state_dict(keep_vars=True).keys()
    return [name for name, _ in model.named_buffers() if name in kept]


def _metrics_of(model: nn.Module) -> dict[str, Any]:
    """The torchmetrics metrics within a model, by path."""
    library = sys.modules.get("torchmetrics")  # a model has none, if it was never imported
    if library is None:
        return {}
    return {name: one for name, one in model.named_modules() if isinstance(one, library.Metric)}


def _shortened(model: nn.Module) -> frozenset[str]:
    """Names of embeddings whose rows a lookup shortens to ``max_norm``."""
    return frozenset(
        f"{name}.weight".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    )


def _mark(tensor: torch.Tensor) -> float:
    """A checksum: equal checksums almost surely mean equal bits."""
    if tensor.is_meta:
        return _UNUSED
    # A copy: numpy would have torch refuse to resize the buffer from now on.
    values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    values = values.reshape(-1).view(torch.uint8)
    return float(zlib.crc32(values.numpy().data))


def _place(parameter: torch.Tensor, *, is_gathered: bool) -> object:
    """An address; of one that is gathered the storage: on a device its address changes then."""
    if is_gathered and not parameter.is_cpu:
        return storage_key(parameter), parameter.storage_offset()
    return parameter.data_ptr()


def _look(parameter: torch.Tensor, *, is_gathered: bool) -> object:
    """A cheap sign of changes; for a frozen one with a value, to detect writes to ``data``."""
    seen = parameter._version, _place(parameter, is_gathered=is_gathered)
    if is_gathered or parameter.requires_grad or not parameter.numel():
        return seen
    return *seen, _mark(parameter[tuple(size // 2 for size in parameter.shape)])


def _gathered(board: StatusBoard | None, number: float) -> list[float]:
    """Every rank's number."""
    if board is None:
        return [number]
    gathered = [row[0] for row in board.all_gather([number])]
    board.barrier()  # all have read them
    return gathered


def _changes_parameter(name: str, how: str = "") -> ModelError:
    return ModelError(
        "A forward pass must not change parameters: every share of a batch would repeat the "
        "change, and the optimizer updates the parameters in place.",
        received=f"a change of {name!r}{how}",
        fix="Keep values that follow the weights, such as a teacher's average, in buffers, or "
        "change them in a callback's on_train_batch_end. Convert the inputs of a module, not the "
        "module. Use max_norm=None for an embedding that several ranks hold.",
    )


def _counts_share(name: str) -> ModelError:
    return ModelError(
        "A metric within the model sees only the samples of its own device.",
        received=f"metric {name!r}, which the model or its train_step has updated",
        fix="Pass it to the Trainer, metrics={...}; with a train_step that gives values for "
        "validation and evaluate. Or train on one device.",
    )
