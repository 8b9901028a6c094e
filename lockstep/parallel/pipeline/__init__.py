"""Forward and backward passes of a rank that holds some stages of the model.

Entry points: ``partition`` (a traced model cut into stages) and ``stage_passes``, which implements
``parallel.data_parallel.passes``. ``plan.pipeline`` decides the cuts and the order.
"""
