"""Hosts of ``host_faults`` whose launchers are forks of warm interpreters."""

import os
from functools import cache, partial

import host_faults

from tests import warm

expected = cache(host_faults.expected)


def fork(kind: str, command: list[str], out: int) -> warm.Process:
    """A command of Python's in a fork of an interpreter of this kind."""
    environment = {**os.environ, **warm.VARIABLES}
    order = warm.Order(words=command[1:], environment=environment, directory=os.getcwd())
    return warm.start(kind, order, out, out)


def how_to_start(strategy: str) -> host_faults.Start:
    """For ``host_faults.Run``."""
    return partial(fork, "keras" if strategy.startswith("Keras") else "torch")
