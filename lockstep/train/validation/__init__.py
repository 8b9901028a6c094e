"""Checks before training: arguments, and that all ranks compute the same.

Entry points: ``checks`` (what a Trainer is given) and ``rank_consistency`` (every rank computes two
samples, and the results are compared bit by bit).
"""
