"""``lockstep doctor RUN``: what has become of a run, by the record that it kept.

The record says what went wrong where the run could still say so. Where it ends in mid-sentence, it
is the process that tells: it lives and makes steps, lives and makes none, or is gone.
"""

import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from lockstep.errors import OptionError, printable
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
from lockstep.train.fault_tolerance.run_record import NAME, Event, Fault, read_record
from lockstep.units import format_seconds

# Of the time of training: so much others have waited for a straggler, which has waited for few.
_STRAGGLING_PART = 0.25
# Beyond the time within which a run would have said that it made steps.
_PATIENCE_SECONDS = 10.0

_ADVICE = {
    DEAD: "Something killed a process. See who ended it; fit(restarts=3) goes on after that.",
    OUT_OF_MEMORY: "Use smaller batches, accumulate=, or more memory.",
    HUNG: "See its last line of code. Raise timeout_seconds of the strategy if it was at work.",
    NETWORK_CUT: "See whether the other host lives, and its own messages.",
    DISK_FULL: "Free room there, or keep fewer checkpoints.",
    DATA_EXHAUSTED: "See the message: the data gives less than was asked for.",
    BAD_RECORD: 'Mend the sample, or pass fit(on_bad_record="skip").',
    NOT_FINITE: "See the layer in the message; a lower learning rate, or clip_norm=, may help.",
    FAILED: "See the message and the line of code.",
    INTERRUPTED: "With checkpoint= the same script goes on from there.",
    TOLD_TO_END: "With checkpoint= the same script goes on from there.",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What has become of a run.

    Attributes:
        is_well: it has ended well, or is under way.
        text: lines for people.
        ranks: what each was at, at last.
    """

    is_well: bool
    text: list[str]
    ranks: Sequence[RankState]


def verdict_of(path: Path) -> Verdict:
    """What the record says.

    Args:
        path: of the record, or of its folder.

    Raises:
        OptionError: there is none.
    """
    try:
        events = read_record(path)
    except OSError as error:
        raise OptionError(
            f"RUN must be a folder in which a fit has kept {NAME}.",
            received=error,
            fix="Pass record= or checkpoint= to fit, or set LOCKSTEP_RECORD.",
        ) from error
    begins = [number for number, event in enumerate(events) if event.what == "begin"]
    if not begins:
        raise OptionError(
            "A record begins with a fit.", received=f"{path} without any", fix="Pass another."
        )
    run = events[begins[-1] :]
    found = _judged(run)
    earlier = [f"Runs before this one in the record: {len(begins) - 1}."] * (len(begins) > 1)
    text = [*_course(run), *found.text, *_stragglers(run), *earlier]
    return Verdict(is_well=found.is_well, text=[*map(printable, text)], ranks=found.ranks)


def rank_table(ranks: Sequence[RankState]) -> Table:
    """What each rank was at, with the last line of code that is known."""
    table = Table("rank", "process", "was at", "waited for", box=None, padding=(0, 2, 0, 0))
    table.add_column("last line of code", overflow="fold")
    for one in ranks:
        awaits = "" if one.awaits is None else f"rank {one.awaits}"
        cells = (str(one.rank), str(one.pid), str(one), awaits, one.line)
        table.add_row(*map(printable, cells))
    return table


def _judged(run: Sequence[Event]) -> Verdict:
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
    said = f"its last word, {format_seconds(passed)} ago, was {_place(run)}"
    if begun.get("host") != socket.gethostname():
        text = f"It has not ended, as far as its record says: {said}. Ask on that host: {where}."
        return Verdict(is_well=True, text=[text], ranks=ranks)
    if start_of(int(begun.get("pid", 0))) != begun.get("start"):
        text = (
            f"Verdict: {DEAD}. The script ({where}) has ended without a word, as after kill -9, "
            f"for want of memory, or with its machine: {said}."
        )
        advice = "Start it again: with checkpoint= it goes on. `dmesg` tells of memory."
        return Verdict(is_well=False, text=[text, advice], ranks=ranks)
    if last.what == "at" and passed > last.next_seconds + _PATIENCE_SECONDS:
        text = f"Verdict: {HUNG}, or at something long: {where} lives; {said}."
        return Verdict(is_well=False, text=[text, _ADVICE[HUNG]], ranks=ranks)
    return Verdict(is_well=True, text=[f"It is under way ({where}); {said}."], ranks=ranks)


def _fault_text(fault: Fault) -> list[str]:
    return [f"Verdict: {fault.kind}. {_who(fault)}", fault.message, _ADVICE.get(fault.kind, "")]


def _who(fault: Fault) -> str:
    state = next((one for one in fault.ranks if one.rank == fault.rank), None)
    if state is None or state.step < 0:
        line = next((one.line for one in fault.ranks if one.line), "")
        return f"It was at {line}." if line else ""
    waiting = [f"rank {one.rank}" for one in fault.ranks if one.awaits == fault.rank]
    waits = f"; {', '.join(waiting)} waited for it" if waiting else ""
    return f"Rank {fault.rank} (process {state.pid}) was at {state}{waits}."


def _course(run: Sequence[Event]) -> Iterator[str]:
    """Where it ran, and what it has outlived."""
    facts = run[0].run
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run[0].time))
    yield (f"{facts.get('script')} on {facts.get('host')}, begun {when}: {facts.get('strategy')}.")
    for event in run:
        if event.what == "fault" and event.fault is not None:
            message = event.fault.message.partition("\n")[0]
            yield f"Outlived: {event.fault.kind}. {_who(event.fault)} {message} {event.fault.then}"
    bad = [event.index for event in run if event.what == "bad record"]
    if bad:
        yield f"Bad records that were skipped: {len(bad)}, the first of them sample {bad[0]}."


def _place(run: Sequence[Event]) -> str:
    found = next((event for event in reversed(run) if event.epoch >= 0), None)
    if found is None:
        return "before the first step"
    return f"after batch {found.batch} of epoch {found.epoch}"


def _stragglers(run: Sequence[Event]) -> Iterator[str]:
    """The rank that all others have waited for, if there is one."""
    trained = [event for event in run if event.what in ("ranks", "at", "end") and event.ranks]
    begun = next((event for event in reversed(trained) if event.what == "ranks"), None)
    if begun is None or len(trained[-1].ranks) < 2:
        return
    seconds = trained[-1].time - begun.time
    waited = {one.rank: one.waited_seconds for one in trained[-1].ranks}
    rank = min(waited, key=waited.__getitem__)
    others = statistics.median(value for one, value in waited.items() if one != rank)
    if others > _STRAGGLING_PART * seconds and waited[rank] < _STRAGGLING_PART * others:
        yield (
            f"Straggler: the others have waited {others / seconds:.0%} of the time for rank {rank}."
            " See what else runs on its cores, or whether its data takes longer."
        )
