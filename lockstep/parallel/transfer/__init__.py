"""Sends models, losses and data to helper processes.

Entry point: ``serialization``. ``readers`` reads batches ahead in threads or processes. Data
between hosts is never pickled: ``comm.codec``.
"""
