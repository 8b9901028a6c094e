"""Compressed gradient sums between hosts.

Entry point: ``compressed_sums``. Which compressor a Plan asks for is ``plan.program.compression``.
"""
