"""Custom training loops: replicas that train together without a Trainer.

Entry points: ``replicas`` (``lockstep.init`` and the like) and ``optimizer``.
"""
