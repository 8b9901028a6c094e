"""``lockstep doctor RUN``: how a run ended, according to its record.

The record says what went wrong if the run could still write it. If the record has no end, the
process shows the state: it runs and makes steps, runs and makes none, or has ended.
"""

import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from lockstep.errors import OptionError, printable
from lockstep.formatting import format_seconds
from lockstep.launch.workers.process_state import start_of
from lockstep.train.fault_tolerance.rank_states import (
    BAD_RECORD,
    DATA_EXHAUSTED,
    DEAD,
    DISK_FULL,
    FAILED,
    HUNG,
    INTERRUPTED,
    NETWORK_CUT,
    NOT_FINITE,
    OUT_OF_MEMORY,
    TOLD_TO_END,
    RankState,
)
from lockstep.train.fault_tolerance.run_record import Event, Fault, recorded_events

# Of the training time: the others have waited more than this for a straggler; it has waited less.
_STRAGGLER_FRACTION = 0.25
# Added to the time within which a run reports its steps.
_GRACE_SECONDS = 10.0

_ADVICE = {
    DEAD: "A process was killed. Find out what killed it; fit(restarts=3) resumes after that.",
    OUT_OF_MEMORY: "Use smaller batches, accumulate=, or more memory.",
    HUNG: "Look at its last line of code. If it was computing, raise the strategy's "
    "timeout_seconds.",
    NETWORK_CUT: "Check whether the other host runs, and read its messages.",
    DISK_FULL: "Free disk space there, or keep fewer checkpoints.",
    DATA_EXHAUSTED: "Read the message: the data has fewer samples than requested.",
    BAD_RECORD: 'Repair the sample, or pass fit(on_bad_record="skip").',
    NOT_FINITE: "Look at the layer in the message; a lower learning rate or clip_norm= may help.",
    FAILED: "Read the message, and look at the line of code.",
    INTERRUPTED: "With checkpoint= the same script resumes from there.",
    TOLD_TO_END: "With checkpoint= the same script resumes from there.",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a run ended, or its present state.

    Attributes:
        is_well: it has ended well, or is running.
        text: lines to show.
        ranks: the last state of each.
    """

    is_well: bool
    text: list[str]
    ranks: Sequence[RankState]


def verdict_of(path: Path) -> Verdict:
    """The verdict of a record.

    Args:
        path: of the record, or of its folder.

    Raises:
        OptionError: there is no record.
    """
    events = recorded_events(path)
    begins = [number for number, event in enumerate(events) if event.what == "begin"]
    if not begins:
        raise OptionError(
            "A record must contain a fit.", received=f"{path} without one", fix="Pass another."
        )
    run = events[begins[-1] :]
    found = _judge(run)
    earlier = [f"Runs before this one in the record: {len(begins) - 1}."] * (len(begins) > 1)
    text = [*_history(run), *found.text, *_find_straggler(run), *earlier]
    return Verdict(is_well=found.is_well, text=[*map(printable, text)], ranks=found.ranks)


def rank_table(ranks: Sequence[RankState]) -> Table:
    """Each rank's last state, with its last known line of code."""
    table = Table("rank", "process", "was at", "waited for", box=None, padding=(0, 2, 0, 0))
    table.add_column("last line of code", overflow="fold")
    for one in ranks:
        awaits = "" if one.awaits is None else f"rank {one.awaits}"
        cells = (str(one.rank), str(one.pid), str(one), awaits, one.line)
        table.add_row(*map(printable, cells))
    return table


def _judge(run: Sequence[Event]) -> Verdict:
    last = run[-1]
    ranks = next((event.ranks for event in reversed(run) if event.ranks), [])
    if last.what == "end" and last.fault is not None:
        is_well = last.fault.kind in (INTERRUPTED, TOLD_TO_END)
        return Verdict(is_well=is_well, text=_fault_text(last.fault), ranks=last.fault.ranks)
    if last.what == "end":
        return Verdict(is_well=True, text=["It has ended well."], ranks=ranks)
    begun = run[0].run
    passed = time.time() - last.time
    where = f"process {begun.get('pid')} on {begun.get('host')}"
    said = f"its last entry, {format_seconds(passed)} ago, was {_last_position(run)}"
    if begun.get("host") != socket.gethostname():
        text = f"Its record has no end: {said}. Run the doctor on that host: {where}."
        return Verdict(is_well=True, text=[text], ranks=ranks)
    if start_of(int(begun.get("pid", 0))) != begun.get("start"):
        text = (
            f"Verdict: {DEAD}. The script ({where}) has ended without a message, as after kill -9, "
            f"lack of memory, or a failure of its machine: {said}."
        )
        advice = "Restart it: with checkpoint= it resumes. `dmesg` shows if memory ran out."
        return Verdict(is_well=False, text=[text, advice], ranks=ranks)
    if last.what == "at" and passed > last.next_seconds + _GRACE_SECONDS:
        text = f"Verdict: {HUNG}, or in a long operation: {where} runs; {said}."
        return Verdict(is_well=False, text=[text, _ADVICE[HUNG]], ranks=ranks)
    return Verdict(is_well=True, text=[f"It is running ({where}); {said}."], ranks=ranks)


def _fault_text(fault: Fault) -> list[str]:
    return [
        f"Verdict: {fault.kind}. {_describe_rank(fault)}",
        fault.message,
        _ADVICE.get(fault.kind, ""),
    ]


def _describe_rank(fault: Fault) -> str:
    state = next((one for one in fault.ranks if one.rank == fault.rank), None)
    if state is None or state.step < 0:
        line = next((one.line for one in fault.ranks if one.line), "")
        return f"It was at {line}." if line else ""
    waiting = [f"rank {one.rank}" for one in fault.ranks if one.awaits == fault.rank]
    waits = f"; {', '.join(waiting)} waited for it" if waiting else ""
    return f"Rank {fault.rank} (process {state.pid}) was at {state}{waits}."


def _history(run: Sequence[Event]) -> Iterator[str]:
    """Where the run was started, the failures that it survived, and its skipped samples."""
    facts = run[0].run
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run[0].time))
    yield (f"{facts.get('script')} on {facts.get('host')}, begun {when}: {facts.get('strategy')}.")
    for event in run:
        if event.what == "fault" and event.fault is not None:
            message = event.fault.message.partition("\n")[0]
            rank = _describe_rank(event.fault)
            yield f"Survived: {event.fault.kind}. {rank} {message} {event.fault.then}"
    bad = [event.index for event in run if event.what == "bad record"]
    if bad:
        yield f"Bad records that were skipped: {len(bad)}, the first of them sample {bad[0]}."


def _last_position(run: Sequence[Event]) -> str:
    found = next((event for event in reversed(run) if event.epoch >= 0), None)
    if found is None:
        return "before the first step"
    return f"after batch {found.batch} of epoch {found.epoch}"


def _find_straggler(run: Sequence[Event]) -> Iterator[str]:
    """The rank for which all others have waited, if there is one."""
    trained = [event for event in run if event.what in ("ranks", "at", "end") and event.ranks]
    begun = next((event for event in reversed(trained) if event.what == "ranks"), None)
    if begun is None or len(trained[-1].ranks) < 2:
        return
    seconds = trained[-1].time - begun.time
    waited = {one.rank: one.waited_seconds for one in trained[-1].ranks}
    rank = min(waited, key=waited.__getitem__)
    others = statistics.median(value for one, value in waited.items() if one != rank)
    if others > _STRAGGLER_FRACTION * seconds and waited[rank] < _STRAGGLER_FRACTION * others:
        yield (
            f"Straggler: the others have waited {others / seconds:.0%} of the time for rank {rank}."
            " Check what else runs on its cores, and whether its data takes longer."
        )
