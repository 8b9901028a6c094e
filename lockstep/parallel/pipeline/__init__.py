"""Forward and backward passes of a rank that holds some stages of the model.

Entry points: ``partition`` (a traced model cut into stages) and ``stage_passes``, which implements
``parallel.data_parallel.passes``. Where to cut and in which order to run is decided in
``plan.pipeline``.
"""
