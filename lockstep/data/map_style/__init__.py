"""Data that every rank reads by index for itself: arrays, files, map-style datasets, columns.

Entry point: ``sources``.
"""
