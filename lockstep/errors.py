"""All errors that Lockstep raises deliberately.

::

    LockstepError
    ├── OptionError          (ValueError)       an invalid argument
    ├── DataError            (ValueError)       data that cannot be trained on
    │   └── BadRecordError                      a sample that cannot be read, or unlike the others
    ├── DeviceError          (ValueError)       a missing device, or a model on the wrong one
    ├── ModelError           (ValueError)       a model that cannot be trained as asked
    ├── PlanError            (ValueError)       a Plan that is malformed or contradicts itself
    ├── CheckpointError      (ValueError)       saved weights that do not fit
    ├── ShippingError        (TypeError)        an object that cannot be sent to a helper process
    ├── LossError            (TypeError)        a loss that returned an invalid value
    ├── NonFiniteError       (ArithmeticError)  something became NaN or infinite
    │   ├── NonFiniteLossError                  the loss did
    │   └── NonFiniteGradientError              a gradient did
    ├── WorkerError          (RuntimeError)     a helper process failed, died or hung
    ├── HostError            (RuntimeError)     another host did not connect, differs, or was lost
    └── ExtraError           (ImportError)      an optional package that is not installed

Each message says what is wrong, what was received and how to fix it. Validators collect all
problems in a ``Problems`` and raise once.
"""

import sys
from pathlib import Path

_PACKAGE = Path(__file__).parent


class LockstepError(Exception):
    """Base of all errors raised by Lockstep.

    Args:
        what: what is wrong; the whole message if there is no fix.
        received: the actual value.
        fix: how to correct it.
    """

    def __init__(self, what: str = "", *, received: object = None, fix: str = "") -> None:
        super().__init__(problem(what, received=received, fix=fix) if fix else what)


class OptionError(LockstepError, ValueError):
    """An argument is invalid."""


class DataError(LockstepError, ValueError):
    """The data cannot be trained on as given.

    Attributes:
        is_end: there is less data than needed.
    """

    is_end = False


class BadRecordError(DataError):
    """A sample cannot be read, or is not like the others.

    Attributes:
        index: the sample's number in its dataset.
        rank: that was reading it; None if no rank was.
    """

    rank: int | None = None

    def __init__(
        self, what: str = "", *, received: object = None, fix: str = "", index: int = -1
    ) -> None:
        super().__init__(what, received=received, fix=fix)
        self.index = index

    def name_rank(self, rank: int) -> None:
        """Add the rank that was reading it, unless it is known."""
        if self.rank is None:
            self.rank = rank
            self.args = (f"{self} Rank {rank} was reading it.",)


class DeviceError(LockstepError, ValueError):
    """A device does not exist, or a model or tensor is on the wrong one."""


class ModelError(LockstepError, ValueError):
    """The model cannot be trained as asked."""


class PlanError(LockstepError, ValueError):
    """A Plan is malformed, contradicts itself, or does not fit the model."""


class CheckpointError(LockstepError, ValueError):
    """Saved weights do not fit the model, or a checkpoint is invalid."""


class ShippingError(LockstepError, TypeError):
    """An object cannot be sent to a helper process."""


class LossError(LockstepError, TypeError):
    """The loss returned neither a scalar, nor per-sample values, nor (total, weight)."""


class NonFiniteError(LockstepError, ArithmeticError):
    """Something is NaN or infinite; the weights are those before the step."""


class NonFiniteLossError(NonFiniteError):
    """The loss of a step is NaN or infinite."""


class NonFiniteGradientError(NonFiniteError):
    """The gradient of a step is NaN or infinite.

    Attributes:
        step: the step's number.
        parameter: the name of the first parameter, in the order of backward, whose gradient it is.
    """

    step = -1
    parameter = ""


class WorkerError(LockstepError, RuntimeError):
    """A helper process failed, died, or did not answer in time.

    Attributes:
        raised: the exception that has ended its work, if it could be sent.
        is_loss: it was killed, or does not answer: its computation was not at fault.
        rank: that has failed, if known.
        kind: "dead", "hung" or "out of memory" of a loss, else "".
    """

    raised: BaseException | None = None
    is_loss = False
    rank: int | None = None
    kind = ""


class HostError(LockstepError, RuntimeError):
    """Another host did not connect, differs from this one, failed, or was lost.

    These errors quote texts of other hosts, with control characters escaped for terminals.

    Attributes:
        raised: an exception like the one that has ended its work, if its type is built in.
        is_loss: it, or one of its processes, was killed, is cut off, or does not answer: its
            computation was not at fault.
    """

    raised: BaseException | None = None
    is_loss = False

    @classmethod
    def of_loss(cls, what: str, *, received: object = None, fix: str = "") -> "HostError":
        """The error for a host that is lost."""
        error = cls(what, received=received, fix=fix)
        error.is_loss = True
        return error

    def __init__(self, what: str = "", *, received: object = None, fix: str = "") -> None:
        super().__init__(what, received=received, fix=fix)
        self.args = tuple(map(printable, self.args))


class ExtraError(LockstepError, ImportError):
    """A feature needs a package that an extra of Lockstep installs."""


def problem(what: str, *, received: object, fix: str) -> str:
    """A message in the form of all of Lockstep's errors."""
    value = reason_of(received) if isinstance(received, OSError) else str(received)
    end = "" if value.endswith(".") and not value.endswith("..") else "."
    return f"{what} Received: {value}{end} {fix}"


def reason_of(error: OSError) -> str:
    """What an error of the operating system says, without its number."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename!r}"


# C0 and C1, but for ends of lines and tabs.
_CONTROL_CHARACTERS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """A text of another host with control characters escaped, so that a terminal only shows it."""
    return text.translate(_CONTROL_CHARACTERS)


class Problems:
    """Collects a validator's problems, to raise them all at once."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, what: str, *, received: object, fix: str) -> None:
        """Note one problem; see ``problem``."""
        self._found.append(problem(what, received=received, fix=fix))

    def raise_if_any(self, error: type[LockstepError]) -> None:
        """Raise ``error`` with all problems, if there are any."""
        if len(self._found) == 1:
            raise error(self._found[0])
        if self._found:
            listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(self._found, 1))
            raise error(f"{len(self._found)} problems:\n{listed}")


def level_of_user() -> int:
    """The ``stacklevel`` of the line outside of Lockstep that has caused a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
