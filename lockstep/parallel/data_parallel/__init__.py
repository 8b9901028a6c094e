"""Forward and backward passes of a rank that holds the whole model.

Entry point: ``model_passes``, which implements ``passes``. ``batch_norm`` and ``linear`` are the
layers that exchange something during a pass. Gradients are summed in ``comm.collectives``.
"""
