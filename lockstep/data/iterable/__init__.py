"""Data that can only be iterated, and its reading position.

Entry points: ``streams`` and ``stream_reader``.
"""
