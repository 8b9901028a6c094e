"""Metrics and the progress that ``fit`` shows.

Entry points: ``metrics`` (torchmetrics over all ranks; ``metric_kinds`` says which of them are
sums) and ``progress`` (bars and lines on screens and in notebooks). Loggers that write files are
callbacks (``lockstep.callbacks``).
"""
