"""Records a training loop: ``lockstep.record``.

On every rank, at each update: losses and samples since the one before, gradients as the optimizer
takes them, the options of its groups, and then its slots, the parameters and the buffers, all as
digests. A recorder only reads. It draws no random numbers, communicates nothing between ranks
(but for DTensors that no range of indices describes, see ``shards``), and keeps neither the model
nor the optimizer alive.
"""

import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from lockstep.errors import OptionError, Problems
from lockstep.proof.recording.forward_order import ForwardOrder
from lockstep.proof.recording.names import Names, buffers_of, parameters_of, unwrapped
from lockstep.proof.recording.observation import (
    Observation,
    Table,
    modules_of,
    place_of,
    random_state,
)
from lockstep.proof.recording.optimizers import watch
from lockstep.proof.recording.record_frames import (
    BUFFER,
    GRADIENT,
    PARAMETER,
    SLOT,
    START,
    Group,
    Header,
    Loss,
    RecordWriter,
    Samples,
    Step,
)
from lockstep.proof.recording.samples import samples_of
from lockstep.proof.recording.watches import Update, Watch, named
from lockstep.version import __version__

# Set by ``lockstep verify script.py``: another folder, another number of steps, and the end of the
# script behind them.
FOLDER_VARIABLE = "LOCKSTEP_RECORD"
STEPS_VARIABLE = "LOCKSTEP_RECORD_STEPS"


def record(
    model: nn.Module,
    optimizer: Any,
    path: str | os.PathLike[str],
    *,
    steps: int = 5,
    tensors: Literal["digest", "full"] = "digest",
) -> "Recorder":
    """Record the first updates of a training loop, on every rank.

    ::

        with lockstep.record(model, optimizer, "runs/ddp") as record:
            for inputs, targets in loader:
                record.batch(inputs, targets)
                loss = loss_function(model(inputs), targets)
                record.loss(loss, weight=len(inputs))
                ...

    Args:
        model: a module, or what DDP, FSDP2, ``torch.compile``, Accelerate, Fabric or DeepSpeed has
            made of it.
        optimizer: whose updates are recorded: torch's, Keras's, a wrapper around one, or a
            sequence of them; None for any of torch that steps on the model's parameters, as where
            a Trainer makes it.
        path: a folder, the same for all ranks; each writes a file of its own there.
        steps: the updates to record; the loop may go on.
        tensors: "digest" for 64 bytes of each tensor and step, "full" for all elements as well.

    Returns:
        A context manager. Within the block, ``batch`` notes the samples of a step and ``loss`` its
        loss.

    Raises:
        OptionError: an argument is invalid.
        OSError: the folder cannot be made.
    """
    problems = Problems()
    unchecked: object = model
    if not isinstance(unchecked, nn.Module):
        problems.add(
            "The model must be a module of torch.",
            received=type(unchecked).__name__,
            fix="Pass the model that is trained, wrapped or not.",
        )
    if not isinstance(steps, int) or steps < 1:
        problems.add("steps must be at least 1.", received=steps, fix="For example: steps=5.")
    if tensors not in ("digest", "full"):
        problems.add(
            'tensors must be "digest" or "full".', received=repr(tensors), fix="Choose one of them."
        )
    problems.raise_if_any(OptionError)
    folder = Path(os.environ.get(FOLDER_VARIABLE, path))
    steps = int(os.environ.get(STEPS_VARIABLE, steps))
    return Recorder(model, optimizer, folder, steps, is_full=tensors == "full")


_recording: set[Path] = set()  # folders of the blocks that have been entered and not left


class Recorder:
    """A recording; see ``record``."""

    def __init__(
        self, model: nn.Module, optimizer: Any, folder: Path, num_steps: int, *, is_full: bool
    ) -> None:
        self._model = weakref.ref(unwrapped(model))
        self._optimizer: Any = optimizer  # until the block begins
        self._library = type(model).__name__
        self._folder = folder
        self._num_steps = num_steps
        self._is_full = is_full
        self._watch: Watch | None = None
        self._order: ForwardOrder | None = None
        self._file: _RankRecord | None = None
        self._names: dict[int, str] = {}
        self._first_state = 0
        self._losses: list[tuple[Any, Any]] = []
        self._samples: list[Samples] = []
        kinds = {"cpu", *(each.device.type for each in model.parameters())}
        self._devices = tuple(filter(torch.amp.is_autocast_available, kinds))
        self._is_done = False
        self._has_begun = False
        self._has_stepped = False  # an optimizer, on a parameter of the model

    def __enter__(self) -> Self:
        if self._is_done or self._watch is not None:
            raise OptionError(
                "A recording can be entered once.",
                received="a second block",
                fix="Call lockstep.record again, with another path.",
            )
        if self._folder.resolve() in _recording:
            raise OptionError(
                "Two recordings at the same time need two folders.",
                received=f"{self._folder}, which another block records into",
                fix="Leave the other block first, or pass another path.",
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._watch = watch(self, self._optimizer)
        _recording.add(self._folder.resolve())
        self._optimizer = None
        self._first_state = random_state()
        model = self._model()
        assert model is not None, "the caller has just passed it"
        self._order = ForwardOrder(model)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
            _recording.discard(self._folder.resolve())
        if kind is None and not self._has_stepped:
            what = "No optimizer has stepped on the model's parameters" + (
                ": those of the optimizer are other tensors, as where they were taken before the "
                "model was wrapped or sharded, or behind a forward pass."
                if self._has_begun
                else f": nothing was recorded into {self._folder}."
            )
            advice = "Pass the model and the optimizer that the loop uses."
            warnings.warn(f"{what} {advice}", stacklevel=2)

    @property
    def is_done(self) -> bool:
        """Whether all steps are recorded."""
        return self._is_done

    def loss(self, value: Any, weight: Any = None) -> None:
        """Note a loss of this rank; several before an update are its parts.

        Args:
            value: the loss, a mean.
            weight: what it is a mean of: a number of samples or of tokens.
        """
        if not self._is_done:
            detached = value.detach() if isinstance(value, torch.Tensor) else value
            self._losses.append((detached, weight))

    def batch(self, *samples: Any) -> None:
        """Note samples of this rank: their numbers, or what the model takes, by digest.

        Args:
            samples: numbers, texts, tensors or arrays whose first dim is that of the samples, or
                trees of them.
        """
        if not self._is_done:
            self._samples.append(samples_of(samples))

    def share(self, *batch: Any) -> Any:
        """This rank's part of a global batch, whose samples are noted.

        So a script trains on the same batches with any number of processes.

        Args:
            batch: tensors or arrays whose first dim is that of the samples.

        Returns:
            The part of each, or of the only one: consecutive samples, as many as other ranks' or
            one more or less.
        """
        rank, size = place_of()
        count = len(batch[0])
        own = tuple(each[count * rank // size : count * (rank + 1) // size] for each in batch)
        self.batch(*own)
        return own if len(own) > 1 else own[0]

    # --- what a watch calls ---------------------------------------------------------------------

    def end_script(self) -> None:
        """See ``Observer``. All ranks come here before the same update, behind its collectives."""
        if STEPS_VARIABLE in os.environ:
            raise SystemExit(0)

    def names_for(self, parameters: Sequence[torch.Tensor]) -> dict[int, str]:
        """See ``Observer``."""
        if any(id(each) not in self._names for each in parameters):
            model = self._model()
            pairs = () if model is None else parameters_of(model)
            self._names = {id(parameter): name for name, parameter in pairs}
        found = named(parameters, self._names)
        self._has_stepped |= bool(found)
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def start(self) -> None:
        """See ``Observer``."""
        model = self._model()
        if self._is_done or model is None or self._file is not None:
            return
        with _plain_arithmetic(self._devices):
            self._file, self._has_begun = self._open(model), True
            self._file.write_start(model, self._first_state)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def before(self, update: Update) -> None:
        """See ``Observer``."""
        model = self._model()
        if self._is_done or model is None:
            return
        self.start()
        assert self._file is not None
        with _plain_arithmetic(self._devices):
            self._file.begin(update)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def after(self, slots: Iterator[tuple[str, Any]]) -> None:
        """See ``Observer``."""
        model = self._model()
        if self._is_done or model is None or self._file is None:
            return
        with _plain_arithmetic(self._devices):
            self._file.finish(model, slots, *self._taken())
        if self._order is not None and self._order.has_seen:
            self._file.writer.write(self._order.remove())
            self._order = None
        if self._file.num_steps >= self._num_steps:
            self._end()

    def _open(self, model: nn.Module) -> "_RankRecord":
        rank, world_size = place_of()
        header = Header(
            rank=rank,
            world_size=world_size,
            device=next((each.device.type for each in model.parameters()), "cpu"),
            library=self._library,
            versions={"torch": str(torch.__version__), "lockstep": __version__},
            modules=modules_of(model),
            is_full=self._is_full,
        )
        return _RankRecord(self._folder, header)

    def _taken(self) -> tuple[tuple[Loss, ...], tuple[Samples, ...]]:
        losses = tuple(
            Loss(float(value), None if weight is None else float(weight))
            for value, weight in self._losses
        )
        samples = tuple(self._samples)
        self._losses.clear()
        self._samples.clear()
        return losses, samples

    def _end(self) -> None:
        """Close the file. The watch is removed behind the block: hooks may be running."""
        self._is_done = True
        if self._order is not None:
            self._order.remove()
        if self._file is not None:
            self._file.close(*self._taken())
        self._order = self._file = None
        self._names.clear()


class _RankRecord:
    """The file of a rank, step by step."""

    def __init__(self, folder: Path, header: Header) -> None:
        self.writer = RecordWriter(folder, header.rank)
        self.writer.write(header)
        self.num_steps = 0
        self._table = Table(self.writer)
        self._is_full = header.is_full
        self._groups: dict[int, tuple[Group, ...]] = {}
        self._canonical: Names | None = None
        self._begun: tuple[Update, Observation, int] | None = None

    def write_start(self, model: nn.Module, state: int) -> None:
        """Write the parameters as they are before the first update."""
        seen = self._observe()
        self._canonical = Names(model)
        seen.add(PARAMETER, parameters_of(model, self._canonical))
        seen.read()
        self._write(seen, step=START, random_state=state)

    def begin(self, update: Update) -> None:
        """Take the gradients of an update."""
        seen = self._observe()
        seen.add(GRADIENT, update.gradients)
        seen.read()
        self._begun = update._replace(gradients=()), seen, random_state()

    def finish(
        self,
        model: nn.Module,
        slots: Iterator[tuple[str, Any]],
        losses: tuple[Loss, ...],
        samples: tuple[Samples, ...],
    ) -> None:
        """Write the step, with what the update has made."""
        assert self._begun is not None
        update, seen, state = self._begun
        parameters = parameters_of(model, self._canonical)
        seen.add(SLOT, slots)
        seen.add(PARAMETER, ((name, each) for name, each in parameters if each.requires_grad))
        seen.add(BUFFER, buffers_of(model, self._canonical))
        seen.read()
        self._write_step(update, seen, state, losses, samples, is_complete=True)

    def close(self, losses: tuple[Loss, ...], samples: tuple[Samples, ...]) -> None:
        """Write what no update has followed, and end the file."""
        if self._begun is not None:
            self._write_step(*self._begun, losses, samples, is_complete=False)
        elif losses or samples:
            last = Step(step=self.num_steps, is_complete=False, losses=losses, samples=samples)
            self.writer.write(last)
        self.writer.close()

    def _write_step(
        self,
        update: Update,
        seen: Observation,
        state: int,
        losses: tuple[Loss, ...],
        samples: tuple[Samples, ...],
        *,
        is_complete: bool,
    ) -> None:
        is_new = self._groups.get(update.optimizer) != update.groups
        self._groups[update.optimizer] = update.groups
        self._write(
            seen,
            step=self.num_steps,
            optimizer=update.optimizer,
            is_complete=is_complete,
            losses=losses,
            samples=samples,
            groups=update.groups if is_new else None,
            random_state=state,
        )
        self._begun = None
        self.num_steps += 1

    def _observe(self) -> Observation:
        return Observation(self._table, is_full=self._is_full)

    def _write(self, seen: Observation, **fields: Any) -> None:
        digests = seen.encode()
        self._table.write_new()
        self.writer.write(Step(**fields, **digests))


@contextmanager
def _plain_arithmetic(devices: Iterable[str]) -> Iterator[None]:
    """No autocast of what the recorder computes."""
    with ExitStack() as stack:
        for each in filter(torch.is_autocast_enabled, devices):
            stack.enter_context(torch.autocast(each, enabled=False))
        yield
