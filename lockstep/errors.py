"""Every error that Lockstep raises on purpose.

::

    LockstepError
    ├── OptionError          (ValueError)       an argument that cannot be
    ├── DataError            (ValueError)       data that cannot be trained on
    │   └── BadRecordError                      a sample that cannot be read, or unlike the others
    ├── DeviceError          (ValueError)       a device that is not there, or holds the wrong thing
    ├── ModelError           (ValueError)       a model that cannot be trained as asked
    ├── PlanError            (ValueError)       a Plan that is malformed or contradicts itself
    ├── CheckpointError      (ValueError)       saved weights that do not fit
    ├── ShippingError        (TypeError)        an object that cannot be sent to a helper process
    ├── LossError            (TypeError)        a loss that returned something else than agreed
    ├── NonFiniteError       (ArithmeticError)  something became NaN or infinite
    │   ├── NonFiniteLossError                  the loss did
    │   └── NonFiniteGradientError              a gradient did
    ├── WorkerError          (RuntimeError)     a helper process failed, died or hung
    ├── HostError            (RuntimeError)     another host did not come, fit in, or stay
    └── ExtraError           (ImportError)      an optional package that is not installed

Each message says what is wrong, what was received and how to fix it. Validators gather every
problem they find in a ``Problems`` and raise once.
"""

import sys
from pathlib import Path

_PACKAGE = Path(__file__).parent


class LockstepError(Exception):
    """Base of all errors raised by Lockstep.

    Args:
        what: what is wrong; the whole message where there is no more to say.
        received: what came instead.
        fix: how to put it right.
    """

    def __init__(self, what: str = "", *, received: object = None, fix: str = "") -> None:
        super().__init__(problem(what, received=received, fix=fix) if fix else what)


class OptionError(LockstepError, ValueError):
    """An argument has a value that it cannot have."""


class DataError(LockstepError, ValueError):
    """The data cannot be trained on as given.

    Attributes:
        is_end: there is less of it than there must be.
    """

    is_end = False


class BadRecordError(DataError):
    """A sample cannot be read, or is not like the others.

    Attributes:
        index: the sample's number in its dataset.
        rank: that was to read it; None where no rank was.
    """

    rank: int | None = None

    def __init__(
        self, what: str = "", *, received: object = None, fix: str = "", index: int = -1
    ) -> None:
        super().__init__(what, received=received, fix=fix)
        self.index = index

    def name_rank(self, rank: int) -> None:
        """Say which rank was to read it, unless that was said."""
        if self.rank is None:
            self.rank = rank
            self.args = (f"{self} It is on rank {rank} that it was to be read.",)


class DeviceError(LockstepError, ValueError):
    """A device does not exist, or a model or tensor is on the wrong one."""


class ModelError(LockstepError, ValueError):
    """The model cannot be trained as asked."""


class PlanError(LockstepError, ValueError):
    """A Plan is malformed, contradicts itself, or does not fit the model."""


class CheckpointError(LockstepError, ValueError):
    """Saved weights do not fit the model, or the file is no checkpoint."""


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
        raised: the exception that has ended its work, where that could be brought here.
        is_loss: it was killed, or does not answer: what it has computed was not at fault.
        rank: that has failed, where that is known.
        kind: "dead", "hung" or "out of memory" of a loss, else "".
    """

    raised: BaseException | None = None
    is_loss = False
    rank: int | None = None
    kind = ""


class HostError(LockstepError, RuntimeError):
    """Another host did not come, is not what this one is, failed, or is gone.

    What other hosts say stands in these errors, so they are fit to be shown on a terminal.

    Attributes:
        raised: an exception like the one that has ended its work, where its type is built in.
        is_loss: it, or a process of its, was killed, is cut off, or does not answer: what it has
            computed was not at fault.
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
    """What was asked for needs a package that only an extra of Lockstep installs."""


def problem(what: str, *, received: object, fix: str) -> str:
    """One message in the shape all of Lockstep's errors have."""
    return f"{what} Received: {received}. {fix}"


# C0 and C1, but for ends of lines and tabs.
_CONTROL_CHARACTERS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Text of another host, that a terminal is to show and not to obey: with visible escapes."""
    return text.translate(_CONTROL_CHARACTERS)


class Problems:
    """Gathers what a validator finds, to raise it all at once."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, what: str, *, received: object, fix: str) -> None:
        """Note one problem; see ``problem``."""
        self._found.append(problem(what, received=received, fix=fix))

    def raise_if_any(self, error: type[LockstepError]) -> None:
        """Raise ``error`` with every problem noted, or do nothing when there is none."""
        if len(self._found) == 1:
            raise error(self._found[0])
        if self._found:
            listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(self._found, 1))
            raise error(f"{len(self._found)} problems:\n{listed}")


def level_of_user() -> int:
    """The ``stacklevel`` of the line outside of Lockstep that has led to a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
