"""The secret that all hosts of a job share, and by which they know each other.

It comes from the environment or from a file that nobody else can read: arguments of a command are
seen by everybody on a machine. Only proofs are made with it; it is never sent, and it cannot be
printed or pickled by mistake.

Where all hosts are one machine, its user need not make one: there is a file of the user's own, that
the first process which looks for it fills.
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
_MOST_BYTES = 4096  # of a file: what is longer is another file, given by mistake

_HOW_TO_MAKE = (
    'Make one with `(umask 077; python -c "import secrets; print(secrets.token_hex(32))" > secret)`'
    f", copy it to every host, and set {SECRET_FILE_VARIABLE}=secret there."
)


class Secret:
    """Makes proofs; shows nothing.

    Args:
        value: what all hosts know, and nobody else.
        origin: where it is from, for messages.
    """

    def __init__(self, value: bytes, origin: str = "") -> None:
        self._value = value
        self.origin = origin

    def key(self, label: bytes) -> bytes:
        """A key for one use: who learns it learns nothing of the secret, nor of other keys."""
        return hmac.digest(self._value, label, "sha256")

    def __repr__(self) -> str:
        return "Secret(not shown)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not sent anywhere")


def find_secret(environ: Mapping[str, str], *, is_one_machine: bool = False) -> Secret:
    """The secret that ``LOCKSTEP_SECRET`` holds, or the file that ``LOCKSTEP_SECRET_FILE`` names.

    White space around it does not count. If both are set, the first one is taken.

    Args:
        environ: the environment's variables.
        is_one_machine: all who are to know it run here; where none is given, it is the user's own.

    Raises:
        HostError: there is none, it is too short, or others can read it.
    """
    if SECRET_VARIABLE in environ:
        return _checked(os.fsencode(environ[SECRET_VARIABLE]), SECRET_VARIABLE)
    if SECRET_FILE_VARIABLE in environ:
        path = environ[SECRET_FILE_VARIABLE]
        return _checked(_read(path), f"{path} ({SECRET_FILE_VARIABLE})")
    if is_one_machine:
        path = _path_of_own(environ)
        return _checked(_read_own(path), path)
    raise HostError(
        "Hosts must share a secret, by which they know each other.",
        received=f"neither {SECRET_VARIABLE} nor {SECRET_FILE_VARIABLE} is set",
        fix=_HOW_TO_MAKE,
    )


def has_secret(environ: Mapping[str, str]) -> bool:
    """Whether one is given."""
    return SECRET_VARIABLE in environ or SECRET_FILE_VARIABLE in environ


def _checked(text: bytes, origin: str) -> Secret:
    value = text.strip()
    if len(value) < _LEAST_BYTES:
        raise HostError(
            f"{origin} is too short for a secret: it must have {_LEAST_BYTES} characters or more.",
            received=f"{len(value)} characters",
            fix=_HOW_TO_MAKE,
        )
    return Secret(value, origin)


def _read(path: str) -> bytes:
    try:
        # Opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), _HOW_TO_MAKE) from error
    try:
        _check_file(path, os.fstat(descriptor))
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _path_of_own(environ: Mapping[str, str]) -> str:
    """Where the user's own secret lies: https://specifications.freedesktop.org/basedir."""
    folder = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(folder):
        home = environ.get("HOME") or os.path.expanduser("~")
        folder = os.path.join(home, ".local", "state")
    return os.path.join(folder, "lockstep", "secret")


def _read_own(path: str) -> bytes:
    """The user's own secret, made now if there is none; of processes at the same time, by one.

    Raises:
        HostError: there can be none, or the file is another user's, or open to others.
    """
    if not os.path.isabs(path):
        raise _no_own(path, "no home folder")
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise _no_own(path, error.strerror or str(error)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _no_own(path, f"a file of user {status.st_uid}")
        _check_file(path, status)
        if status.st_size == 0:
            os.pwrite(descriptor, secrets.token_hex(32).encode() + b"\n", 0)
        return os.pread(descriptor, _MOST_BYTES, 0)
    except OSError as error:
        raise _no_own(path, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def _no_own(path: str, received: str) -> HostError:
    return HostError(
        "Hosts that are one machine share a secret that lies in a file of the user's.",
        received=f"{path}: {received}",
        fix=f"Set XDG_STATE_HOME to a folder of your own, or {SECRET_FILE_VARIABLE} to a file "
        "with a secret.",
    )


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
    what = "A secret must lie in a file that its owner alone can read."
    return HostError(what, received=f"{path}: {received}", fix=fix)
