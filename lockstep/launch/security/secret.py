"""The secret with which the hosts of a job authenticate each other.

It is in the environment or in a file that only its owner can read, because all users of a machine
can read a command's arguments. The secret only makes proofs; it is never sent, and it cannot be
printed or pickled by mistake.

If all hosts are one machine, users need not make a secret: the first process that needs one writes
it to a file in the user's home.
"""

import fcntl
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from lockstep.errors import HostError

SECRET_VARIABLE = "LOCKSTEP_SECRET"
SECRET_FILE_VARIABLE = "LOCKSTEP_SECRET_FILE"

_LEAST_BYTES = 16
_MOST_BYTES = 4096  # of a file: a longer one was given by mistake

_HOW_TO_MAKE = (
    'Make one with `(umask 077; python -c "import secrets; print(secrets.token_hex(32))" > secret)`'
    f", copy it to every host, and set {SECRET_FILE_VARIABLE}=secret there."
)


class Secret:
    """Makes proofs; shows nothing.

    Args:
        value: the bytes that only the job's hosts know.
        source: the variable or file that holds it, for messages.
    """

    def __init__(self, value: bytes, source: str = "") -> None:
        self._value = value
        self.source = source

    def key(self, label: bytes) -> bytes:
        """A key for one use, which reveals neither the secret nor other keys."""
        return hmac.digest(self._value, label, "sha256")

    def __repr__(self) -> str:
        return "Secret(not shown)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret must not be pickled")


def find_secret(environ: Mapping[str, str], *, is_one_machine: bool = False) -> Secret:
    """The secret in ``LOCKSTEP_SECRET``, or in the file that ``LOCKSTEP_SECRET_FILE`` names.

    White space around it is removed. If both variables are set, the first is used.

    Args:
        environ: the environment's variables.
        is_one_machine: all hosts are this machine; without a given secret, the user's is used.

    Raises:
        HostError: there is none, it is too short, or other users can read it.
    """
    if SECRET_VARIABLE in environ:
        return _make_secret(os.fsencode(environ[SECRET_VARIABLE]), SECRET_VARIABLE)
    if SECRET_FILE_VARIABLE in environ:
        path = environ[SECRET_FILE_VARIABLE]
        return _make_secret(_read(path), f"{path} ({SECRET_FILE_VARIABLE})")
    if is_one_machine:
        path = _user_secret_path(environ)
        return _make_secret(_read_user_secret(path), path)
    raise HostError(
        "The hosts of a job must share a secret, with which they authenticate each other.",
        received=f"neither {SECRET_VARIABLE} nor {SECRET_FILE_VARIABLE} is set",
        fix=_HOW_TO_MAKE,
    )


def has_secret(environ: Mapping[str, str]) -> bool:
    """True if a secret is given."""
    return SECRET_VARIABLE in environ or SECRET_FILE_VARIABLE in environ


def _make_secret(text: bytes, source: str) -> Secret:
    value = text.strip()
    if len(value) < _LEAST_BYTES:
        raise HostError(
            f"The secret in {source} must have at least {_LEAST_BYTES} characters.",
            received=f"{len(value)} characters",
            fix=_HOW_TO_MAKE,
        )
    return Secret(value, source)


def _read(path: str) -> bytes:
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unusable_file(path, error.strerror or str(error), _HOW_TO_MAKE) from error
    try:
        _check_file(path, os.fstat(descriptor))
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _user_secret_path(environ: Mapping[str, str]) -> str:
    """The path of the user's secret: https://specifications.freedesktop.org/basedir."""
    folder = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(folder):
        home = environ.get("HOME") or os.path.expanduser("~")
        folder = os.path.join(home, ".local", "state")
    return os.path.join(folder, "lockstep", "secret")


def _read_user_secret(path: str) -> bytes:
    """The user's secret; one process writes it if there is none.

    Raises:
        HostError: it cannot be written, or the file is another user's or readable by others.
    """
    if not os.path.isabs(path):
        raise _no_user_secret(path, "the user has no home folder")
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise _no_user_secret(path, error.strerror or str(error)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _no_user_secret(path, f"the file belongs to user {status.st_uid}")
        _check_file(path, status)
        if status.st_size == 0:
            os.pwrite(descriptor, secrets.token_hex(32).encode() + b"\n", 0)
        return os.pread(descriptor, _MOST_BYTES, 0)
    except OSError as error:
        raise _no_user_secret(path, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def _no_user_secret(path: str, received: str) -> HostError:
    return HostError(
        "If all hosts are one machine, their secret must be in a file of the user.",
        received=f"{path}: {received}",
        fix=f"Set XDG_STATE_HOME to a folder that you own, or {SECRET_FILE_VARIABLE} to a file "
        "with a secret.",
    )


def _check_file(path: str, status: os.stat_result) -> None:
    """Check the opened file's status; its name might refer to another file meanwhile."""
    if not stat.S_ISREG(status.st_mode):
        raise _unusable_file(path, "not a regular file", _HOW_TO_MAKE)
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.filemode(status.st_mode)
        raise _unusable_file(
            path, f"mode {mode}, accessible to other users", f"Run `chmod 600 {path}`."
        )
    if status.st_size > _MOST_BYTES:
        raise _unusable_file(path, f"a file of {status.st_size} bytes", _HOW_TO_MAKE)


def _unusable_file(path: str, received: str, fix: str) -> HostError:
    what = "A secret must be in a file that only its owner can read."
    return HostError(what, received=f"{path}: {received}", fix=fix)
