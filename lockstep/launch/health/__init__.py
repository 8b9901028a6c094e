"""Failed, stopped and slow processes: noticed, described and measured.

Entry points: ``failure`` (exceptions and deaths, reported to rank 0) and ``heartbeats``.
"""
