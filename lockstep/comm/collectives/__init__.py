"""Sums of gradients over shares, ranks and hosts, in a fixed order.

Entry points: ``gradients`` (the interface), ``shm_gradient_buffer`` (one host),
``reduce_scatter`` (ranks that share no memory) and ``overlapped_reduce`` (the same, during
backward). The bytes are moved by a ``comm.transport``.
"""
