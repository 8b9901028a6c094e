"""Samples as records: a cache that several processes fill, and records that cannot be read.

Entry points: ``sample_cache`` and ``bad_records``.
"""
