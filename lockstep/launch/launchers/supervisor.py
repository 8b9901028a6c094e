"""The supervisor of ``lockstep run --restarts``: restarts the script after it has died.

The supervisor is the process that the user started. The script is its fork, made before the
script's imports. The kernel kills the script when the supervisor dies, and the helpers when the
script dies. The script resumes from its checkpoints, as at any other start.

Signals are passed on to the script, except those that the terminal has sent to both. A script that
ends by such a signal is not restarted.
"""

import os
import signal
import sys

from lockstep.errors import OptionError
from lockstep.launch.health.failure import describe_exit
from lockstep.launch.workers.helper import die_with

_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_WATCHED = _ENDING | {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2}

# No restart: success, wrong usage (which would happen again), Ctrl-C, SIGTERM.
_FINAL = frozenset({0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM})

# ``si_code`` of a signal that the kernel has sent to all processes of the terminal.
_SI_KERNEL = 0x80


def supervise(restarts: int) -> int | None:
    """Fork the script's process, and restart it after deaths.

    Args:
        restarts: how often to restart it.

    Returns:
        None in each process that runs the script; its last exit status in the supervisor.

    Raises:
        OptionError: the system is not Linux: elsewhere a script would outlive its supervisor.
    """
    if sys.platform != "linux":
        raise OptionError(
            "--restarts needs Linux, whose kernel ends a script when its supervisor dies.",
            received=sys.platform,
            fix="Leave it out, and let a service manager restart the script.",
        )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    number = 0
    while True:
        supervisor = os.getpid()
        if (script := os.fork()) == 0:
            die_with(supervisor)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return None
        status, was_ended_by_signal = _end_of(script)
        shell_status = status if status >= 0 else 128 - status
        if was_ended_by_signal or shell_status in _FINAL:
            return shell_status
        number += 1
        if number > restarts:
            _report(status, f"all {restarts} restarts are used up")
            return shell_status
        _report(status, f"restart {number} of {restarts}")


def _end_of(script: int) -> tuple[int, bool]:
    """Wait for the script's end; returns its exit status, and True if a signal here ended it."""
    was_ended_by_signal = False
    while True:
        ended, status = os.waitpid(script, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), was_ended_by_signal
        info = signal.sigwaitinfo(_WATCHED)
        if info.si_signo == signal.SIGCHLD:
            continue
        was_ended_by_signal = was_ended_by_signal or info.si_signo in _ENDING
        if info.si_code != _SI_KERNEL:
            os.kill(script, info.si_signo)


def _report(status: int, what: str) -> None:
    text = f"lockstep run: the script has ended: {describe_exit(status)}; {what}."
    print(text, file=sys.stderr, flush=True)  # noqa: T201
