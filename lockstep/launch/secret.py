"""The secret that all hosts of a job share, and by which they know each other.

It comes from the environment or from a file that nobody else can read: arguments of a command are
seen by everybody on a machine. Only proofs are made with it; it is never sent, and it cannot be
printed or pickled by mistake.
"""

import hmac
import os
import stat
from collections.abc import Mapping
from typing import NoReturn

from lockstep.errors import HostError, problem

SECRET_VARIABLE = "LOCKSTEP_SECRET"
SECRET_FILE_VARIABLE = "LOCKSTEP_SECRET_FILE"

_LEAST_BYTES = 16
_MOST_BYTES = 4096  # of a file: what is longer is another file, given by mistake

_HOW_TO_MAKE = (
    'Make one with `(umask 077; python -c "import secrets; print(secrets.token_hex(32))" > secret)`'
    f", copy it to every host, and set {SECRET_FILE_VARIABLE}=secret there."
)


class Secret:
    """Makes proofs; shows nothing.

    Args:
        value: what all hosts know, and nobody else.
    """

    def __init__(self, value: bytes) -> None:
        self._value = value

    def key(self, label: bytes) -> bytes:
        """A key for one use: who learns it learns nothing of the secret, nor of other keys."""
        return hmac.digest(self._value, label, "sha256")

    def __repr__(self) -> str:
        return "Secret(not shown)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not sent anywhere")


def find_secret(environ: Mapping[str, str]) -> Secret:
    """The secret that ``LOCKSTEP_SECRET`` holds, or the file that ``LOCKSTEP_SECRET_FILE`` names.

    White space around it does not count. If both are set, the first one is taken.

    Raises:
        HostError: there is none, it is too short, or others can read it.
    """
    if SECRET_VARIABLE in environ:
        return _checked(os.fsencode(environ[SECRET_VARIABLE]), f"{SECRET_VARIABLE} is too short")
    if SECRET_FILE_VARIABLE in environ:
        path = environ[SECRET_FILE_VARIABLE]
        return _checked(_read(path), f"{path} ({SECRET_FILE_VARIABLE}) is too short")
    raise HostError(
        problem(
            "Hosts must share a secret, by which they know each other.",
            received=f"neither {SECRET_VARIABLE} nor {SECRET_FILE_VARIABLE} is set",
            fix=_HOW_TO_MAKE,
        )
    )


def _checked(text: bytes, complaint: str) -> Secret:
    value = text.strip()
    if len(value) < _LEAST_BYTES:
        raise HostError(
            problem(
                f"{complaint} for a secret: it must have {_LEAST_BYTES} characters or more.",
                received=f"{len(value)} characters",
                fix=_HOW_TO_MAKE,
            )
        )
    return Secret(value)


def _read(path: str) -> bytes:
    try:
        # Not to wait for whoever would write to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), _HOW_TO_MAKE) from error
    try:
        _check_file(path, os.fstat(descriptor))
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _check_file(path: str, status: os.stat_result) -> None:
    """Look at the file that was opened, not at the name, which others might change meanwhile."""
    if not stat.S_ISREG(status.st_mode):
        raise _unusable(path, "no regular file", _HOW_TO_MAKE)
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.filemode(status.st_mode)
        raise _unusable(path, f"mode {mode}, open to others", f"Run `chmod 600 {path}`.")
    if status.st_size > _MOST_BYTES:
        raise _unusable(path, f"a file of {status.st_size} bytes", _HOW_TO_MAKE)


def _unusable(path: str, received: str, fix: str) -> HostError:
    what = f"{SECRET_FILE_VARIABLE} must name a file with a secret that its owner alone can read."
    return HostError(problem(what, received=f"{path}: {received}", fix=fix))
