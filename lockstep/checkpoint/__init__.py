"""State that does not depend on who computed it: weights in files, and whole trainings.

``fit(..., checkpoint=lockstep.Checkpoint("folder"))`` writes checkpoints; what is here reads them,
without a Trainer.
"""

from lockstep.checkpoint.reading import DamagedCheckpointWarning, load_state_dict

__all__ = ["DamagedCheckpointWarning", "load_state_dict"]
