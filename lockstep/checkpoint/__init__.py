"""Checkpoints and weights in files, which do not depend on the strategy that trained them.

``fit(..., checkpoint=lockstep.Checkpoint("folder"))`` writes checkpoints; this package reads them
without a Trainer.
"""

from lockstep.checkpoint.reading import DamagedCheckpointWarning, load_state_dict

__all__ = ["DamagedCheckpointWarning", "load_state_dict"]
