"""From what a user gives as data to the batches of a task.

Entry point: ``data_adapter``. Data that is read by index is read by every rank for itself
(``data.map_style``); an iterable is read by rank 0, which shares each batch (``stream_broadcast``).
"""
