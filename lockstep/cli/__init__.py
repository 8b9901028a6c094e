"""The ``lockstep`` command: from arguments to calls, one file per command."""
