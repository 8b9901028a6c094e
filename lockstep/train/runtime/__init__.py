"""Runs a task on all ranks: the Plan, the processes, and what each of them is sent.

Entry points: ``runner`` (tasks of one model, one after the other) and ``session`` (one task on all
ranks); ``serving`` is the helper's side. What the ranks then do is in ``train.fit``; how processes
start is in ``launch.workers``.
"""
