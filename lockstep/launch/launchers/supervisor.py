"""The supervisor of ``lockstep run --restarts``: starts the script again when it has died.

It is the process that was started; the script is a fork of it, made before anything was imported
that a script needs. The kernel kills the script when its supervisor dies, and the script's helpers
with the script: nothing is left. What the script was told before its death it must find in its
checkpoints, as at any other start.

Signals are passed on, but for those that the terminal has sent to both. Whoever ends the script so
wants no restart.
"""

import os
import signal
import sys

from lockstep.errors import OptionError
from lockstep.launch.health.failure import describe_exit
from lockstep.launch.workers.helper import die_with

_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_WATCHED = _ENDING | {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2}

# Somebody wanted the end, or it would be the same again: wrong usage, Ctrl-C, SIGTERM.
_FINAL = frozenset({0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM})

# In ``si_code``: sent by the kernel, to all processes of the terminal.
_SI_KERNEL = 0x80


def supervise(restarts: int) -> int | None:
    """Fork, and see to it that the script comes to an end.

    Args:
        restarts: how often to start it again.

    Returns:
        None in the process that is to run the script, each time; here its last exit status.

    Raises:
        OptionError: not on Linux, where alone a script dies with its supervisor.
    """
    if sys.platform != "linux":
        raise OptionError(
            "--restarts needs Linux, whose kernel ends a script with what supervises it.",
            received=sys.platform,
            fix="Leave it out, and have a service manager start the script again.",
        )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    number = 0
    while True:
        supervisor = os.getpid()
        if (script := os.fork()) == 0:
            die_with(supervisor)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return None
        status, is_told = _end_of(script)
        shell_status = status if status >= 0 else 128 - status
        if is_told or shell_status in _FINAL:
            return shell_status
        number += 1
        if number > restarts:
            _say(status, f"all {restarts} restarts are used up")
            return shell_status
        _say(status, f"restart {number} of {restarts}")


def _end_of(script: int) -> tuple[int, bool]:
    """Wait for the script's end; its exit status, and whether it was told here to end."""
    is_told = False
    while True:
        ended, status = os.waitpid(script, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), is_told
        info = signal.sigwaitinfo(_WATCHED)
        if info.si_signo == signal.SIGCHLD:
            continue
        is_told = is_told or info.si_signo in _ENDING
        if info.si_code != _SI_KERNEL:
            os.kill(script, info.si_signo)


def _say(status: int, what: str) -> None:
    text = f"lockstep run: the script has ended: {describe_exit(status)}; {what}."
    print(text, file=sys.stderr, flush=True)  # noqa: T201
