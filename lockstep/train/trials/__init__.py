"""Trials: a training with copies of everything, for a few steps, in a process that may die.

``trial_process`` runs them. ``batch_size_search`` tries sizes; ``plan_trials`` tries plans, among
which ``AutoStrategy`` chooses.
"""
