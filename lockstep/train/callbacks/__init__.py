"""Calls callbacks on rank 0 and sends their changes to all ranks.

Entry points: ``callback`` (the class that users derive from), ``fit_driver`` (calls them between
steps) and ``rank_sync`` (broadcasts what changed). The callbacks that come with Lockstep are in
``lockstep.callbacks``.
"""
