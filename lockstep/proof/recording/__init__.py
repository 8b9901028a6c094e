"""Records of any training loop, of any library, and comparisons of two of them.

Entry points: ``recorder`` (``lockstep.record``), ``comparison`` (``lockstep.compare``) and
``script_runs`` (``lockstep verify script.py``). Nothing here communicates between ranks or changes
what is trained: each rank writes a file of its own, and whoever compares reads them all.
"""
