"""Keras 3 on its PyTorch backend: models made or compiled in ``strategy.scope()``.

A Keras model on this backend is a torch module whose variables hold torch Parameters, so it trains
as any model does, by a runner of its own (``trainer``). The modules here say what Keras calls
things: the model (``model``), how it is sent (``shipping``), its losses, metrics and optimizer, its
data, and the methods that users call (``methods``), which stand in for Keras's own on the model
itself. Keras's classes stay as they are outside of a scope.
"""
