"""Finds the layer where values stop being finite or where two runs begin to differ.

Entry points: ``diagnosis`` and ``module_watch``.
"""
