"""The search for the Plan that costs least.

Entry point: ``ranking.best_plans``. ``candidates`` yields Plans of every family with their costs,
``layouts`` finds the best layout of stages exactly, ``intervals`` has the costs of all runs of
units for it. Not here: the costs themselves (``plan.cost``).
"""
