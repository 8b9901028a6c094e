"""Forward and backward passes of a rank that holds the whole model.

Entry point: ``model_passes``, which implements ``passes``. ``batch_norm`` and ``linear`` have the
layers that exchange data during a pass. ``comm.collectives`` sums gradients.
"""
