"""Resuming from a checkpoint: what must be equal, and what the script may have changed.

Entry points: ``resuming_runner`` (a runner whose ``fit`` writes checkpoints and resumes) and
``fit_record`` (a checkpoint's facts about its ``fit``). The state itself is
``train.checkpointing``.
"""
