"""A pool of teams.

Helpers are forked from a server that lives as long as the script, so that it starts one interpreter
and imports modules once (``fork_server``).

By default every trainer has its own fresh team, which ends with it. Inside ``keep_teams`` a few
idle teams stay alive, and serve the next trainer that needs their size. A kept helper has the
modules that it imported, so this is for code that does not change meanwhile.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from lockstep.launch.workers.fork_server import FORKS, ForkServerBackend
from lockstep.launch.workers.team import Team

# Idle teams kept of each kind: as many as trainers usually alternate.
_MOST_IDLE = 2

_Key = tuple[int, int | None, tuple[str, ...], int]
_kept: ContextVar[dict[_Key, list[Team]] | None] = ContextVar("kept_teams", default=None)

# By interpreter and threads; processes are state of the process, not of a task.
_servers: dict[tuple[str, int | None], ForkServerBackend] = {}


@contextmanager
def keep_teams() -> Iterator[None]:
    """Within the block, keep teams for the next trainer; end them with the block."""
    pool: dict[_Key, list[Team]] = {}
    token = _kept.set(pool)
    try:
        yield
    finally:
        _kept.reset(token)
        for teams in pool.values():
            for team in teams:
                team.close()


def take_team(
    num_helpers: int,
    threads: int | None,
    preload: tuple[str, ...] = (),
    *,
    first_rank: int = 1,
) -> Team:
    """A team that is alive, kept or fresh.

    Args:
        num_helpers: its processes.
        threads: OpenMP threads that each helper starts with; None keeps the environment's setting.
        preload: modules that helpers of a fresh team have imported before they start.
        first_rank: the first helper's; the others have the next.
    """
    idle = (_kept.get() or {}).get((num_helpers, threads, preload, first_rank), [])
    while idle:
        team = idle.pop()
        if team.answers():
            return team
        team.close()
    return Team(num_helpers, partial(warm_server, threads, preload), first_rank=first_rank)


def expect_team(threads: int | None, preload: tuple[str, ...] = ()) -> None:
    """Start the server of a fresh team in advance."""
    if FORKS:
        warm_server(threads, preload)


def give_back(team: Team, threads: int | None, preload: tuple[str, ...] = ()) -> None:
    """Return a team: keep it for the next trainer that needs the same, or end it."""
    key = (team.num_helpers, threads, preload, team.first_rank)
    pool = _kept.get()
    idle = None if pool is None else pool.setdefault(key, [])
    if idle is not None and team.is_alive and len(idle) < _MOST_IDLE:
        idle.append(team)
    else:
        team.close()


def warm_server(threads: int | None, preload: tuple[str, ...]) -> ForkServerBackend:
    """The server for helpers of this kind, started now if there is none.

    A server of another environment is dropped, and ends with the last of its helpers. A server that
    lacks some of the modules imports them.
    """
    key = (sys.executable, threads)
    server = _servers.get(key)
    if server is None or not (server.is_alive and server.is_current):
        server = ForkServerBackend(threads, preload)
        if server.forks:
            _servers[key] = server
    server.load(preload)
    return server
