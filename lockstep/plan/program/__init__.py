"""The program of one rank: a Plan lowered to a list of actions.

Entry points: ``lowering`` and ``rank_program``. Running it is ``parallel.worker``.
"""
