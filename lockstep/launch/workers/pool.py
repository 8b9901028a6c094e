"""The fork servers of a script, and fresh teams of helpers.

Helpers are forked from a server that lives as long as the script, so that it starts one interpreter
and imports modules once (``fork_server``). Every trainer has its own team, which ends with it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.launch.workers.fork_server import FORKS, ForkedHelper, ForkServer
from lockstep.launch.workers.team import Team

# By interpreter and threads; processes are state of the process, not of a task.
_servers: dict[tuple[str, int | None], ForkServer] = {}


def take_team(
    num_helpers: int, threads: int | None, preload: tuple[str, ...] = (), *, first_rank: int = 1
) -> Team:
    """A fresh team.

    Args:
        num_helpers: its processes.
        threads: OpenMP threads that each helper starts with; None keeps the environment's setting.
        preload: modules that helpers have imported before they start.
        first_rank: the first helper's; the others have the next.
    """

    def start(rank: int) -> ForkedHelper:
        return ForkedHelper(warm_server(threads, preload), rank)

    return Team(num_helpers, start, first_rank=first_rank)


def expect_team(threads: int | None, preload: tuple[str, ...] = ()) -> None:
    """Start the server of a fresh team in advance."""
    if FORKS:
        warm_server(threads, preload)


def warm_server(threads: int | None, preload: tuple[str, ...]) -> ForkServer:
    """The server for helpers of this kind, started now if there is none.

    A server of another environment is dropped, and ends with the last of its helpers. A server that
    lacks some of the modules imports them.
    """
    key = (sys.executable, threads)
    server = _servers.get(key)
    if server is None or not (server.is_alive and server.is_current):
        server = ForkServer(threads, preload)
        if server.forks:
            _servers[key] = server
    server.load(preload)
    return server


@contextmanager
def own_server(threads: int | None) -> Iterator[None]:
    """Around teams that are soon over: a server that starts for them ends with the block."""
    key = (sys.executable, threads)
    before = _servers.get(key)
    try:
        yield
    finally:
        server = _servers.get(key)
        if server is not None and server is not before:
            del _servers[key]
            server.close()
