"""The position of a ``fit`` between two of its steps, from which it can resume."""

from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.trees import Tree
from lockstep.parallel.parameter_server.async_worker import ServerProgress


@dataclass(frozen=True)
class FitPosition:
    """See the module.

    Attributes:
        epoch: number of the epoch of the next step.
        is_begun: its ``on_epoch_begin`` was called.
        stops: a callback has stopped training there, and one more step is due.
        batch: number of the next batch in the epoch.
        num_steps: made so far by the task under way.
        so_far: losses and metrics of the epoch (``train.fit.epoch_sums``); None before it begins.
        read: for a stream, the number of batches used, and their checksum; else None.
        replicas: with local steps, the state of each replica of its own
            (``train.checkpointing.replica_state``).
        residuals: of all hosts that compress what they send (``train.optim.error_feedback``).
        is_lasting: another process can resume from there.
        served: progress of asynchronous workers and servers in the epoch.
        num_ended: with ``served``, batches of the epoch whose end callbacks were called for.
    """

    epoch: int = 0
    is_begun: bool = False
    stops: bool = False
    batch: int = 0
    num_steps: int = 0
    so_far: Any = None
    read: list[int] | None = None
    replicas: Any = None
    residuals: Any = None
    is_lasting: bool = True
    served: ServerProgress | None = None
    num_ended: int = 0

    @classmethod
    def of(cls, tree: dict[str, Tree]) -> "FitPosition":
        """The position in a training's state, from which a new task resumes."""
        return cls(
            tree["epoch"],
            is_begun=tree["batch"] > 0,
            batch=tree["batch"],
            so_far=tree["so_far"],
            replicas=tree.get("replicas"),
        )

    def tree(self) -> dict[str, Tree]:
        """The parts that a training's state has."""
        names = ("epoch", "batch", "so_far", "read", "replicas")
        return {name: getattr(self, name) for name in names}
