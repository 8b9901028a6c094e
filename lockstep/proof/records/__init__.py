"""Comparisons of records, and the likely cause of the first difference: ``lockstep.compare``.

Entry point: ``outcome``. Reads what ``lockstep.proof.recording`` has written; trains nothing.
"""
