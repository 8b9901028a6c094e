"""What Lockstep adds to Keras: two callbacks, and strategies of Keras's distributions."""

from lockstep.extras import import_extra

import_extra("keras", extra="keras", user="lockstep.keras")

from lockstep.frontends.keras.fit.checkpoints import Checkpoint as Checkpoint  # noqa: E402  # it imports Keras
from lockstep.frontends.keras.fit.checkpoints import Restarts as Restarts  # noqa: E402
from lockstep.strategies.keras_distribution import strategy_of as strategy_of  # noqa: E402

__all__ = ["Checkpoint", "Restarts", "strategy_of"]
