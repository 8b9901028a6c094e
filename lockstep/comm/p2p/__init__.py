"""Messages between pipeline stages.

Entry point: ``interface``. Implementations: shared memory of one host (``shm_p2p``), sockets
between hosts (``tcp_p2p``), torch.distributed (``process_group_p2p``).
"""
