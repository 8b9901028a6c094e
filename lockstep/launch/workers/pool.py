"""Where teams come from and go to.

Helpers are forked from a template that lives as long as the script, so that the start of an
interpreter and its imports are paid once (see ``template``).

By default every trainer has a team of its own, fresh, and ended with it. Inside ``keep_teams``
teams go on living and serve the next that asks for their size, but for those that are too many. A
kept helper has the modules it imported, so this is for code that does not change meanwhile.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from lockstep.launch.workers.fork_server import FORKS, Template
from lockstep.launch.workers.team import Team

# Idle teams of a kind that are kept: as many as trainers commonly take turns.
_MOST_IDLE = 2

_Key = tuple[int, int | None, tuple[str, ...], int]
_kept: ContextVar[dict[_Key, list[Team]] | None] = ContextVar("kept_teams", default=None)

# By interpreter and threads; processes are state of the process, not of a task.
_templates: dict[tuple[str, int | None], Template] = {}


@contextmanager
def keep_teams() -> Iterator[None]:
    """Within the block, hand teams on instead of ending them; end them with the block."""
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
    """A living team, kept or fresh.

    Args:
        num_helpers: processes it has.
        threads: OpenMP threads each helper starts with; None leaves the environment's setting.
        preload: modules that a fresh team's helpers should have imported.
        first_rank: of the helpers; the others have the next.
    """
    idle = (_kept.get() or {}).get((num_helpers, threads, preload, first_rank), [])
    while idle:
        team = idle.pop()
        if team.answers():
            return team
        team.close()
    return Team(num_helpers, partial(warm_template, threads, preload), first_rank=first_rank)


def expect_team(threads: int | None, preload: tuple[str, ...] = ()) -> None:
    """A fresh team is going to be asked for: its template starts meanwhile."""
    if FORKS:
        warm_template(threads, preload)


def give_back(team: Team, threads: int | None, preload: tuple[str, ...] = ()) -> None:
    """Done with a team: keep it for others who ask for the same, or end it."""
    key = (team.num_helpers, threads, preload, team.first_rank)
    pool = _kept.get()
    idle = None if pool is None else pool.setdefault(key, [])
    if idle is not None and team.is_alive and len(idle) < _MOST_IDLE:
        idle.append(team)
    else:
        team.close()


def warm_template(threads: int | None, preload: tuple[str, ...]) -> Template:
    """The template for helpers of this kind, started now if there is none.

    One that came from another environment is dropped: it ends with the last of its helpers. One
    that lacks some of the modules imports them.
    """
    key = (sys.executable, threads)
    template = _templates.get(key)
    if template is None or not (template.is_alive and template.is_current):
        template = Template(threads, preload)
        if template.forks:
            _templates[key] = template
    template.load(preload)
    return template
