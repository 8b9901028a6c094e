"""How tensors move between ranks that share no memory: one interface.

- ``TensorChannels`` (``comm.transports.tensor_channels``): Lockstep's own connections between
  hosts.
- ``ProcessGroupTransport`` (``comm.transports.process_group_transport``): torch.distributed, with
  any of its backends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

# Tensors by the rank at the other end.
Buffers = Mapping[int, Sequence[torch.Tensor]]


def nothing_to_wait_for() -> None:
    """The end of a transfer that is complete."""


class Transport(ABC):
    """One rank's end. All ranks that take part make the same transfers in the same order."""

    @abstractmethod
    def transfer(self, sends: Buffers, receives: Buffers) -> None:
        """Send tensors and fill others, all at once, until everything has come and gone.

        Args:
            sends: dense tensors by rank, in the order in which the other end receives them.
            receives: dense tensors by rank, which are written to.

        Raises:
            HostError: another host is gone, what came is not what it sent, or time is up.
            WorkerError: another rank is gone.
        """


class NoTransport(Transport):
    """The transport of a rank alone, which sends nothing."""

    def transfer(self, sends: Buffers, receives: Buffers) -> None:
        assert not sends
        assert not receives

    def begin(self, sends: Buffers, receives: Buffers, *, tag: int) -> Callable[[], None]:
        """As ``ProcessGroupTransport.begin``."""
        self.transfer(sends, receives)
        return nothing_to_wait_for
