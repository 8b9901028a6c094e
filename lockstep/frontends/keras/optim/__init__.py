"""Keras optimizers that step on pieces of variables.

Entry point: ``updater``.
"""
