"""What Lockstep adds to Keras, beside ``strategy.scope()``: ``lockstep.keras.Checkpoint``."""

from lockstep.extras import import_extra

import_extra("keras", extra="keras", user="lockstep.keras")

from lockstep.frontends.keras.checkpoints import Checkpoint as Checkpoint  # noqa: E402  # it imports Keras

__all__ = ["Checkpoint"]
