"""``python -m lockstep``: the same as the ``lockstep`` command."""

import sys

from lockstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
