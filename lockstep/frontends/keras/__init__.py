"""Keras 3 on its PyTorch backend: models made or compiled in ``strategy.scope()``.

A Keras model on this backend is a torch module whose variables hold torch Parameters. It trains as
any model does, by the parts of any Trainer (``trainer``). Users call ``methods``, which override
Keras's own on the model itself; ``model`` wraps the model as a torch module. The folders have its
data and tasks (``fit``), losses (``loss``), optimizers (``optim``), custom steps (``custom_steps``)
and layers, metrics and pickling (``layers``). Keras's classes are unchanged outside of a scope.
"""
