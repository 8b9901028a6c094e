"""Transports of tensors between ranks that share no memory.

Implementations of ``comm.transport``: sealed sockets (``tensor_channels``) and torch.distributed
(``process_group_transport``, over the groups that ``process_group`` makes).
"""
