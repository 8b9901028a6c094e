"""Data that can only be iterated, and how far it has been read.

Entry points: ``streams`` and ``stream_reader``.
"""
