"""Fresh interpreters: Python processes like the script's, which end with it.

They have the script's interpreter, options, environment, working directory and module search path,
but nothing of its state. No ``if __name__`` guard is needed: they never run the script's file.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future

from lockstep.channel.background import Background
from lockstep.errors import WorkerError
from lockstep.launch.health.diagnostics import DiagnosticsFile
from lockstep.pickling import search_path


def start_interpreter(
    code: str, descriptors: tuple[int, ...], diagnostics: DiagnosticsFile, threads: int | None
) -> "subprocess.Popen[bytes]":
    """Start a fresh interpreter that runs ``code``.

    Args:
        code: Python source, which can import ``lockstep`` and all that the script can import.
        descriptors: passed on under the same numbers.
        diagnostics: the file for the standard error.
        threads: OpenMP threads that it starts with; None keeps the environment's setting.

    Raises:
        WorkerError: it cannot be started.
    """
    command = [
        sys.executable,
        *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]  # -O, -W, -X
        "-c",
        f"import sys; sys.path[:] = {search_path()!a}\n{code}",
    ]
    try:
        return _spawn(
            lambda: subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # If there is none, the first file that the process opens would take its number.
                stdout=subprocess.DEVNULL if sys.__stdout__ is None else None,
                stderr=diagnostics.descriptor,
                env=environment(threads),
                pass_fds=descriptors,
                process_group=0,  # Ctrl-C in the terminal must reach only the script
            )
        )
    except OSError as error:
        raise WorkerError(
            "A helper process could not be started.",
            received=f"{error} (the interpreter is {sys.executable!r})",
            fix="Check sys.executable, and the limits on processes and memory.",
        ) from error


def environment(threads: int | None) -> dict[str, str]:
    """The script's environment for processes with this many OpenMP threads.

    ``torch.cuda.is_available`` asks NVML there. CUDA itself, once asked, works in no fork of the
    process any more; and Keras asks when it is imported.
    """
    changed = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ, **changed}


_spawner = Background("lockstep-spawner")


def _spawn(make: Callable[[], "subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
    """Start a process from a thread that lives as long as this process.

    The kernel kills a process when the *thread* that started it ends (man 2 prctl,
    PR_SET_PDEATHSIG), and ``fit`` may be called from a short-lived one. Also, Ctrl-C never
    interrupts a start in that thread.
    """
    future = _spawner.submit(make)
    try:
        return future.result()
    except BaseException:  # Ctrl-C: the process is not needed any more
        future.add_done_callback(_end)
        raise


def _end(future: "Future[subprocess.Popen[bytes]]") -> None:
    if future.exception() is None:
        future.result().kill()
        future.result().wait()


def _forget_spawner() -> None:
    """A fork has no threads: it needs its own spawner."""
    global _spawner
    _spawner = Background("lockstep-spawner")


os.register_at_fork(after_in_child=_forget_spawner)
