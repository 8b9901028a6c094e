"""The logger of events, ``logging.getLogger("lockstep")``: silent until a script adds a handler.

Only the process of a training that shows progress logs. ``docs/training.md`` lists the events.
"""

import logging

LOGGER = logging.getLogger("lockstep")
LOGGER.addHandler(logging.NullHandler())
