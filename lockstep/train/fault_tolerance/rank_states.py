"""What ranks were doing when a training failed, which rank each waited for, and the fault's kind.

A killed process cannot report. But its last position is in memory that all ranks of the host share,
and living ranks can be asked for their stacks.
"""

import errno
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.disk import SHORTAGES
from lockstep.errors import BadRecordError, DataError, HostError, NonFiniteError, WorkerError
from lockstep.formatting import first_few
from lockstep.launch.health.failure import causes_of, message_of
from lockstep.launch.workers.team import Team

# Kinds of faults. Errors of lost ranks and hosts have their kind as an attribute.
DEAD, HUNG, OUT_OF_MEMORY, NETWORK_CUT = "dead", "hung", "out of memory", "network cut"
DISK_FULL, DATA_EXHAUSTED, BAD_RECORD = "disk full", "data exhausted", "bad record"
NOT_FINITE, INTERRUPTED, TOLD_TO_END, FAILED = "not finite", "interrupted", "told to end", "failed"

# Faults of this process's own rank, if an error names no other.
_LOCAL = (FAILED, OUT_OF_MEMORY, DISK_FULL, BAD_RECORD)

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)')
_PACKAGE = str(Path(__file__).parents[2])
_LIBRARIES = (_PACKAGE, "site-packages", "<frozen", f"{Path(torch.__file__).parent}")
_OF_PYTHON = str(Path(re.__file__).parent.parent)


class RankState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The position of one rank.

    Attributes:
        rank: its number.
        pid: of its process; 0 if unknown.
        step: the step that it was in; -1 before the first.
        phase: of the step: one of ``PHASES``.
        awaits: the rank that it waited for; None for none.
        waited_seconds: its total wait for others since training began.
        line: the last known line of code.
    """

    rank: int
    pid: int = 0
    step: int = -1
    phase: str = ""
    awaits: int | None = None
    waited_seconds: float = 0.0
    line: str = ""

    def __str__(self) -> str:
        where = f"step {self.step}" if self.step >= 0 else "no step yet"
        return f"{where} ({self.phase})" if self.phase and self.step >= 0 else where


def states_of(team: Team | None, board: StatusBoard | None, first_rank: int) -> list[RankState]:
    """The states of this host's ranks.

    Args:
        team: its helpers; None without.
        board: on which ranks publish their positions.
        first_rank: the rank of this process.
    """
    if board is None or team is None:
        return [RankState(rank=first_rank, pid=os.getpid())]
    pids = {first_rank: os.getpid(), **team.known_pids()}
    return [
        RankState(
            rank=rank,
            pid=pid,
            step=board.step_of(rank),
            phase=board.phase_of(rank),
            awaits=board.awaited_by(rank),
            waited_seconds=round(board.waited_by(rank), 3),
        )
        for rank, pid in pids.items()
    ]


def culprit(states: Sequence[RankState], error: BaseException) -> int | None:
    """The rank at fault: the one that an error names, or that all others wait for in the end.

    Or this process's, for a fault of its own; None if no rank is at fault.
    """
    rank, kind = rank_of(error), kind_of(error)
    if rank is not None:
        return rank
    if kind != HUNG:
        return states[0].rank if kind in _LOCAL else None
    awaits = {state.rank: state.awaits for state in states}
    last = states[0].rank
    for _ in states:
        awaited = awaits.get(last)
        last = last if awaited is None else awaited
    return last


def add_lines(states: Sequence[RankState], error: BaseException, team: Team | None) -> None:
    """Note the last line of code of each rank, if known."""
    lost = rank_of(error)  # a rank that hangs still answers
    stacks = {} if team is None else team.stacks()
    own = "".join([*traceback.format_stack(), *traceback.format_tb(error.__traceback__)])
    for state in states:
        if state.rank in stacks and state.rank != lost:
            state.line = last_line(stacks[state.rank], is_newest_first=True)
        elif state.rank in stacks:
            is_crash = "--- last output" in str(error)
            state.line = last_line(_text_of(error), is_newest_first=is_crash)
        else:
            state.line = last_line(own)


def last_line(text: str, *, is_newest_first: bool = False) -> str:
    """The innermost frame of a stack or traceback that is in the user's code, or else any.

    Args:
        text: of the stack; empty text or one without frames gives "".
        is_newest_first: in the order of ``faulthandler``, with several threads.
    """
    if is_newest_first:
        _, _, current = text.rpartition("Current thread")
        frames = list(_FRAME.finditer(current or text))
    else:
        frames = list(_FRAME.finditer(text))[::-1]
    own = [one for one in frames if not _is_of_libraries(one["file"])]
    found = next(iter(own or frames), None)
    return "" if found is None else f"{found['file']}:{found['line']} in {found['function']}"


def _is_of_libraries(file: str) -> bool:
    return any(part in file for part in _LIBRARIES) or file.startswith((_OF_PYTHON, "<string>"))


def _text_of(error: BaseException) -> str:
    """The messages of an error of another rank, with its traceback."""
    return "\n".join([*map(message_of, causes_of(error)), *getattr(error, "__notes__", ())])


def rank_of(error: BaseException) -> int | None:
    """The failed rank, if an error names it; None for this process."""
    for one in causes_of(error):
        if isinstance(one, WorkerError | BadRecordError) and one.rank is not None:
            return one.rank
    return None


def kind_of(error: BaseException) -> str:
    """The kind of a fault, in a word or two."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return TOLD_TO_END
    kinds = (_kind_of_one(one) for one in causes_of(error))
    return next((kind for kind in kinds if kind), FAILED)


def _kind_of_one(error: BaseException) -> str:
    if isinstance(error, WorkerError):
        return error.kind
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in (*SHORTAGES, errno.ENOMEM):
        return OUT_OF_MEMORY if error.errno == errno.ENOMEM else DISK_FULL
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's, CPUs
        return OUT_OF_MEMORY
    if isinstance(error, HostError) and error.raised is None:
        return NETWORK_CUT
    if isinstance(error, BadRecordError):
        return BAD_RECORD
    if isinstance(error, DataError) and error.is_end:
        return DATA_EXHAUSTED
    return NOT_FINITE if isinstance(error, NonFiniteError) else ""


def fault_summary(states: Sequence[RankState], error: BaseException) -> str:
    """A sentence for the error: the position of the lost rank, and the ranks that waited for it."""
    lost = culprit(states, error)
    state = next((one for one in states if one.rank == lost), None)
    if state is None or state.step < 0:
        return ""
    waiting = [one.rank for one in states if one.awaits == lost]
    waits = f"waited for by rank {first_few(waiting)}" if waiting else "no rank waited for it yet"
    return f"Rank {lost} was at {state}, {waits}."
