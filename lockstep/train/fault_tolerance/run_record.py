"""The record of a run: the events of each ``fit``, as lines of JSON, for ``lockstep doctor``.

It is small: a line at the begin and end of a ``fit``, one for each fault, and progress at growing
intervals. Each line is written at once. If the process is killed, the record ends there; the doctor
then knows the last line, and that the process is gone.

If a record cannot be written, because the disk is full, training goes on and lines are lost.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import msgspec

from lockstep.comm.shared_memory.memory_usage import peak_memory
from lockstep.errors import OptionError
from lockstep.events import LOGGER
from lockstep.formatting import format_value
from lockstep.launch.health.failure import add_note, noting_on, summary_of
from lockstep.launch.workers.process_state import start_of
from lockstep.launch.workers.team import Team
from lockstep.plan.cost.corrections import RunCost
from lockstep.train.fault_tolerance.rank_states import (
    RankState,
    add_lines,
    culprit,
    kind_of,
    states_of,
)
from lockstep.train.runtime.model_profile import remember_run
from lockstep.version import __version__

NAME = "record.jsonl"
VARIABLE = "LOCKSTEP_RECORD"

# Interval between lines of progress: at least, as a part of the time so far, and at most.
_LEAST_SECONDS, _PART, _MOST_SECONDS = 1.0, 0.01, 60.0
_LONGEST_MESSAGE = 4000
_MOST_BAD_RECORDS = 1000

# The last steps of a run, of which the median is its speed.
_MOST_STEPS = 1000

# The fewest steps whose median time can judge a prediction.
_ENOUGH_STEPS = 10


class Fault(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A fault.

    Attributes:
        kind: see ``train.fault_tolerance.rank_states``.
        message: the error's.
        rank: at fault; None if it is unknown, or not a rank of this host.
        ranks: the states of all.
        then: the consequence for the run.
    """

    kind: str
    message: str
    rank: int | None = None
    ranks: list[RankState] = []
    then: str = ""


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line.

    Attributes:
        what: "begin", "ranks", "at", "epoch", "bad record", "fault", "measured" or "end".
        time: seconds since 1970.
        run: of "begin": host, process, script and strategy; of "epoch": its values; of "measured":
            the Plan, what was predicted of it, and its steps and memory.
        epoch: of the step before.
        batch: likewise.
        next_seconds: of "at": the next such line comes within these, if steps are made.
        ranks: of "ranks" and "at".
        fault: of "fault" and "end".
        index: of "bad record": the sample's number.
        reason: likewise.
    """

    what: str
    time: float
    run: dict[str, Any] = {}
    epoch: int = -1
    batch: int = -1
    next_seconds: float = 0.0
    ranks: list[RankState] = []
    fault: Fault | None = None
    index: int = -1
    reason: str = ""


class RunRecord:
    """Writes the record of a ``fit``.

    Args:
        folder: for the record, made if missing; None to keep none.
        logs: log all events, too.

    Attributes:
        planned: returns the Plan, and what was predicted of it.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, logs: bool = False) -> None:
        self._logs = logs
        self._path = None if folder is None else Path(folder) / NAME
        self._look: Callable[[], list[RankState]] = list
        self._failure: tuple[BaseException, list[RankState]] | None = None
        self._epoch = self._batch = -1
        self._began = self._due = time.monotonic()
        self._num_bad = 0
        self._last_step = 0.0
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self.planned: Callable[[], dict[str, Any]] = dict

    def _log(self, level: int, text: str, *values: Any) -> None:
        if self._logs:
            LOGGER.log(level, text, *values)

    @contextmanager
    def kept(self, strategy: object) -> Iterator[None]:
        """Around the ``fit`` under a strategy."""
        self._log(INFO, "fit begins: %r", strategy)
        try:
            with self._kept_in_file(strategy=type(strategy).__name__):
                yield
        except BaseException as error:
            if isinstance(error, Exception):
                self._log(ERROR, "fit fails: %s", summary_of(error))
            else:  # Ctrl-C, or a signal to end
                self._log(WARNING, "fit is interrupted: %s", type(error).__name__)
            raise
        self._log(INFO, "fit ends")

    @contextmanager
    def _kept_in_file(self, **run: Any) -> Iterator[None]:
        if self._path is None:
            yield
            return
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        pid = os.getpid()
        self._write(
            "begin",
            run={
                **run,
                "host": socket.gethostname(),
                "pid": pid,
                "start": start_of(pid),
                "script": sys.argv[0],
                "lockstep": __version__,
            },
        )
        try:
            yield
        except BaseException as error:
            with noting_on(error):
                self._write("end", **self._place, fault=self._fault(error, "it ended"))
            hint = f"`lockstep doctor {self._path.parent}` tells more, from the record of the run."
            if not isinstance(error, KeyboardInterrupt) and self._path.is_file():
                add_note(error, hint)
            raise
        self._write("measured", run=self._measured())
        self._write("end", **self._place, ranks=self._look())

    def _measured(self) -> dict[str, Any]:
        """The Plan, its predicted costs, and the real ones."""
        seconds = statistics.median(self._steps) if self._steps else 0.0
        planned, peak = self.planned(), peak_memory()
        if planned.get("ranking") and len(self._steps) >= _ENOUGH_STEPS:
            modelled, num_bytes = planned["ranking"][0]["as_modelled"]
            family = planned["ranking"][0]["family"]
            remember_run(
                RunCost(family=family, seconds=(modelled, seconds), num_bytes=(num_bytes, peak))
            )
        return {**planned, "step_seconds": seconds, "peak_bytes": peak}

    def begin_run(self, look: Callable[[], list[RankState]]) -> None:
        """Ranks are about to train; ``look`` returns their states."""
        self._look = look
        self._write("ranks", ranks=look())

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins."""
        self._epoch, self._batch = epoch, -1
        self._last_step = 0.0

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """An epoch has ended, with these values."""
        values = ", ".join(f"{name} {format_value(value)}" for name, value in logs.items())
        self._log(INFO, "epoch %d ends: %s", epoch + 1, values)
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self._write("epoch", epoch=epoch, run=numbers)

    def end_step(self, index: int) -> None:
        """A step is made."""
        self._batch = index
        now = time.monotonic()
        if self._path is None:
            return
        if self._last_step:  # else it is the first of an epoch, which begins before it
            self._steps.append(now - self._last_step)
        self._last_step = now
        if now < self._due:
            return
        wait = min(max(_LEAST_SECONDS, _PART * (now - self._began)), _MOST_SECONDS)
        self._due = now + wait
        self._write("at", **self._place, next_seconds=wait, ranks=self._look())

    def note_bad_record(self, index: int, reason: str) -> None:
        """A sample is left out."""
        self._log(WARNING, "sample %d is left out: %s", index, reason)
        self._num_bad += 1
        if self._num_bad <= _MOST_BAD_RECORDS:
            self._write("bad record", index=index, reason=reason)

    def note_failure(self, error: BaseException, states: list[RankState], team: Team) -> None:
        """Note the ranks' states before they are ended because of an error."""
        if self._path is not None:
            add_lines(states, error, team)
            self._failure = error, states

    def note_restart(self, error: BaseException, then: str) -> None:
        """Note that a rank was lost, and the run resumes."""
        self._log(WARNING, "%s %s", f"{error}".partition("\n")[0], then)
        if self._path is not None:
            self._write("fault", **self._place, fault=self._fault(error, then))

    @property
    def _place(self) -> dict[str, int]:
        return {"epoch": self._epoch, "batch": self._batch}

    def _fault(self, error: BaseException, then: str) -> Fault:
        seen, states = self._failure or (None, [])
        if seen is not error:
            states = states_of(None, None, 0)
            add_lines(states, error, None)
        return Fault(
            kind=kind_of(error),
            message=summary_of(error)[:_LONGEST_MESSAGE],
            rank=culprit(states, error),
            ranks=states,
            then=then,
        )

    def _write(self, what: str, **values: Any) -> None:
        if self._path is None:
            return
        event = Event(what=what, time=round(time.time(), 3), **values)
        with suppress(OSError):
            line = _encoded(event) + b"\n"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)


def checked_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that a user has named for records, which need not exist yet.

    Raises:
        OptionError: it is a file, or within one.
    """
    folder = Path(path)
    there = next((each for each in (folder, *folder.parents) if os.path.exists(each)), None)
    if there is not None and not there.is_dir():
        raise OptionError(
            "The record of a run needs a folder.",
            received=f"{folder}, where {there} is a file",
            fix=f"Name a folder, which need not exist yet, as record= or in {VARIABLE}.",
        )
    return folder


def _encoded(event: Event) -> bytes:
    try:
        return msgspec.json.encode(event)
    except UnicodeEncodeError:  # halves of surrogates, as in names of files that are no text
        return json.dumps(msgspec.to_builtins(event), ensure_ascii=False).encode(errors="replace")


def read_record(path: Path) -> list[Event]:
    """The lines of a record, without a last one that is incomplete.

    Args:
        path: of the file, or its folder.

    Raises:
        OSError: it cannot be read.
    """
    lines = (path / NAME if path.is_dir() else path).read_bytes().splitlines()
    events = []
    for line in lines:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            events.append(msgspec.json.decode(line, type=Event))
    return events


def recorded_events(path: Path) -> list[Event]:
    """The lines of a record that a user has named; see ``read_record``.

    Raises:
        OptionError: there is no record.
    """
    try:
        return read_record(path)
    except OSError as error:
        raise OptionError(
            f"RUN must be a folder in which a fit has written {NAME}.",
            received=error,
            fix="Pass record= or checkpoint= to fit, or set LOCKSTEP_RECORD.",
        ) from error
