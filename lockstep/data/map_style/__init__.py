"""Data that every rank reads by index: arrays, files, map-style datasets, columns.

Entry point: ``sources``.
"""
