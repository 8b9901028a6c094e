"""Calls callbacks on rank 0 and tells all ranks what they changed.

Entry points: ``callback`` (the class that users derive from), ``fit_driver`` (calls them between
steps) and ``rank_sync`` (broadcasts what changed). The callbacks that come with Lockstep are in
``lockstep.callbacks``.
"""
