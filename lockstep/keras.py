"""Callbacks that Lockstep adds to Keras: ``Checkpoint`` and ``Restarts``."""

from lockstep.extras import import_extra

import_extra("keras", extra="keras", user="lockstep.keras")

from lockstep.frontends.keras.fit.checkpoints import Checkpoint as Checkpoint  # noqa: E402  # it imports Keras
from lockstep.frontends.keras.fit.checkpoints import Restarts as Restarts  # noqa: E402

__all__ = ["Checkpoint", "Restarts"]
