"""Failed, stopped and slow processes: noticed, described and measured.

Entry points: ``failure`` (an exception or a death, told to rank 0) and ``heartbeats``.
"""
