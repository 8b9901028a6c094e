"""The state of a training: taken, kept in memory or in files, and set again.

Entry points: ``training_state`` (what the state is) and ``checkpoints`` (``fit(checkpoint=)``).
The file format is in ``lockstep.checkpoint``.
"""
