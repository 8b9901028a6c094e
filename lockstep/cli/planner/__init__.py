"""``lockstep plan`` and ``lockstep report``, and the ranked table of the former."""
