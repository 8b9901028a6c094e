"""Samples as records: a cache that several processes fill, and the skipping of bad records.

Entry points: ``sample_cache`` and ``bad_records``.
"""
