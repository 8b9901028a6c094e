"""torch's process-wide settings that decide what is computed: the same on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """What a script may have set before ``fit``.

    Attributes:
        default_dtype: of new floating tensors.
        deterministic: whether only deterministic algorithms may be used.
        warn_only: whether breaking that only warns.
        autocast_dtype: of CPU autocast; None where it is off.
    """

    default_dtype: torch.dtype
    deterministic: bool
    warn_only: bool
    autocast_dtype: torch.dtype | None

    @classmethod
    def current(cls) -> "TorchSettings":
        """Those of this process and thread."""
        autocast = torch.is_autocast_enabled("cpu")
        return cls(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            autocast_dtype=torch.get_autocast_dtype("cpu") if autocast else None,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In force within the block, in this process and thread."""
        before = TorchSettings.current()
        self._set()
        enabled = self.autocast_dtype is not None
        try:
            with torch.autocast("cpu", dtype=self.autocast_dtype, enabled=enabled):
                yield
        finally:
            before._set()

    def _set(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        now = TorchSettings.current()
        # It imports torch.compile's machinery, for longer than all else a helper starts with.
        if (now.deterministic, now.warn_only) != (self.deterministic, self.warn_only):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """So many compute threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
