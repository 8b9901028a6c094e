"""Keras's ``fit``, ``evaluate`` and ``predict`` as tasks of all ranks.

Entry points: ``tasks``, and ``fit_driver``, which calls Keras's callbacks between steps.
"""
