"""State that does not depend on who computed it: weights in files, and whole trainings.

``fit(..., checkpoint=lockstep.Checkpoint("folder"))`` writes checkpoints; what is here reads them,
without a Trainer.
"""

import os
from typing import Any

from lockstep.checkpoint.reading import (
    DamagedCheckpointWarning as DamagedCheckpointWarning,
)
from lockstep.checkpoint.reading import (
    read_checkpoint,
)


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model's weights and buffers, for ``model.load_state_dict`` of plain PyTorch.

    Args:
        path: of a folder with checkpoints, of which the newest whole one is read; or of one.

    Returns:
        What ``model.state_dict()`` was, tensors in this process's memory.

    Warns:
        DamagedCheckpointWarning: of newer ones that are damaged.

    Raises:
        CheckpointError: there is none, or none is whole.
    """
    return read_checkpoint(path).state_dict()
