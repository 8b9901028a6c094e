"""Going on from a checkpoint: what must be the same, and what the script may have changed.

Entry points: ``resuming_runner`` (a runner whose ``fit`` is kept) and ``fit_record`` (what a
checkpoint knows of its ``fit``). The state itself is ``train.checkpointing``.
"""
