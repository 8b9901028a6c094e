"""Sharded parameters: each rank keeps its part, and has the rest only while a pass uses it.

Entry point: ``residency.Residency``. Gradients are divided by ``comm.collectives.sharded_reduce``,
the optimizer's slots by the update of pieces, as under every strategy.
"""
