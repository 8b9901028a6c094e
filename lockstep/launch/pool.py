"""Where teams come from and go to.

By default every trainer has a team of its own, fresh, and ended with it. Inside ``keep_teams``
teams go on living and serve the next that asks for their size: a start of seconds is paid once.
A kept helper has the modules it imported, so this is for code that does not change meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lockstep.launch.team import Team

_Key = tuple[int, int | None]
_kept: ContextVar[dict[_Key, list[Team]] | None] = ContextVar("kept_teams", default=None)


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


def take_team(num_helpers: int, threads: int | None) -> Team:
    """A living team, kept or fresh."""
    idle = (_kept.get() or {}).get((num_helpers, threads), [])
    while idle:
        team = idle.pop()
        if team.is_alive:
            return team
        team.close()
    return Team(num_helpers, threads)


def give_back(team: Team, threads: int | None) -> None:
    """Done with a team: keep it for others, or end it."""
    pool = _kept.get()
    if pool is not None and team.is_alive:
        pool.setdefault((team.num_helpers, threads), []).append(team)
    else:
        team.close()
