"""Local SGD: replicas that step on parameters of their own and average them periodically.

Entry point: ``local_worker``. The Plan's side is ``plan.averaging``.
"""
