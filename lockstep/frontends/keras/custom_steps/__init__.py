"""Keras models with a ``train_step``, ``test_step`` or ``compute_metrics`` of their own.

Entry points: ``custom_step`` (finds them) and ``custom_step_tasks`` (runs them).
"""
