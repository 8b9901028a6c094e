"""Sharded parameters: each rank keeps its part, and has the rest only while a pass uses it.

Entry point: ``residency.Residency``. ``comm.collectives.sharded_reduce`` divides the gradients. The
update of pieces divides the optimizer's slots, as under every strategy. Models that no rank can
hold at the start are not here yet.
"""
