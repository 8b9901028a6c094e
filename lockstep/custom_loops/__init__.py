"""Loops of the user's own: replicas that train together without a Trainer."""
