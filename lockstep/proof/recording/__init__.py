"""Records of any training loop, of any library, in files: ``lockstep.record``.

Entry point: ``recorder``. Nothing here communicates between ranks or changes what is trained: each
rank writes a file of its own. ``lockstep.proof.records`` reads and compares them.
"""
