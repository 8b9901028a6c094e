"""Resuming from a checkpoint: what must be equal, and what the script may have changed.

Entry points: ``fit_checkpoints`` (writes the checkpoints of a ``fit`` and resumes from them) and
``fit_record`` (a checkpoint's facts about its ``fit``). The state itself is
``train.checkpointing``.
"""
