"""Turns the data that a user passes into the batches of a task.

Entry point: ``data_adapter``. Every rank reads indexed data for itself (``data.map_style``);
rank 0 reads an iterable and shares each batch (``stream_broadcast``).
"""
