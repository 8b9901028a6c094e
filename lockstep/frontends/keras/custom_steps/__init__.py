"""Keras models with a ``train_step``, ``test_step`` or ``compute_metrics`` of their own.

Entry points: ``step_trial`` (tries them before training) and ``custom_step_tasks`` (runs them).
"""
