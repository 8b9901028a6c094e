"""Teams of helpers that tests keep from one trainer to the next, and do not start anew.

Inside ``keep_teams`` a trainer that is gone leaves its team to the next one that needs its size. A
kept helper has the modules that it imported, so this is for code that does not change meanwhile.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from lockstep.errors import WorkerError
from lockstep.launch.workers import pool
from lockstep.launch.workers.team import Team
from lockstep.train.runtime import session
from lockstep.train.runtime.job_context import JobContext
from lockstep.train.runtime.runner import Runner
from lockstep.train.runtime.session import Session
from tests import forgetting

# Idle teams of each kind: as many as trainers usually alternate.
_MOST_IDLE = 2
_SECONDS = 3.0

_Key = tuple[int, int | None, tuple[str, ...], int]
_kept: ContextVar[dict[_Key, list[Team]] | None] = ContextVar("kept_teams", default=None)
_begin_session = Runner._begin_session


@contextmanager
def keep_teams() -> Iterator[None]:
    """Within the block, keep teams for the next trainer; end them with the block."""
    kept: dict[_Key, list[Team]] = {}
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
        for teams in kept.values():
            for team in teams:
                team.close()


def _take_team(
    num_helpers: int, threads: int | None, preload: tuple[str, ...] = (), *, first_rank: int = 1
) -> Team:
    idle = (_kept.get() or {}).get((num_helpers, threads, preload, first_rank), [])
    while idle:
        team = idle.pop()
        if team.answers():
            return team
        team.close()
    return pool.take_team(num_helpers, threads, preload, first_rank=first_rank)


def _begin_keeping(runner: Runner, job_context: JobContext) -> None:
    _begin_session(runner, job_context)
    runner._finalizer.detach()
    vars(runner)["_finalizer"] = weakref.finalize(runner, _release, runner.session)


def _release(own: Session) -> None:
    """Keep a session's team, or end it."""
    team, kept = own._team, _kept.get()
    if kept is not None and team is not None and not own._is_attached and _forgets(team):
        key = team.num_helpers, own._threads, own._preload, team.first_rank
        idle = kept.setdefault(key, [])
        if len(idle) < _MOST_IDLE:
            own._team = None
            idle.append(team)
    own.close()


def _forgets(team: Team) -> bool:
    """Have idle helpers drop what they keep of earlier calls; False if they do not answer."""
    with suppress(WorkerError):
        if team.answers():
            team.call(
                forgetting.forget,
                b"",
                position=lambda rank: "between trainers",
                timeout_seconds=_SECONDS,
            )
            team.finish(_SECONDS)
            return True
    return False


vars(session)["take_team"] = _take_team
Runner._begin_session = _begin_keeping  # type: ignore[assignment,method-assign]
