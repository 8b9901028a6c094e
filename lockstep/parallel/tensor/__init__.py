"""Tensor parallelism: layers divided inside (Shoeybi et al., "Megatron-LM", arXiv 1909.08053).

Every rank runs the whole model on the same samples. While it does, torch's products are redirected
(``parameters.DividedParameters``): of one with a divided weight the rank computes its shards. What
comes out is a ``DividedTensor``: the rank's parts of it. Operations that work on each part by
itself (``rules``) keep it divided. Any other operation gathers it first, and so does all that is
unknown: no result depends on what was planned.

Parameters stay whole, in the memory that the ranks of a host share. This folder does not decide how
many shards there are (``plan.makers.tensor``); it observes how a model uses its parameters
(``observing``).
"""
