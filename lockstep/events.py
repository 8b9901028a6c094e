"""What happens, for ``logging.getLogger("lockstep")``: silent, until a script gives it a handler.

Of all processes of a training the one that shows progress logs. ``docs/training.md`` lists the
events.
"""

import logging

LOGGER = logging.getLogger("lockstep")
LOGGER.addHandler(logging.NullHandler())
