"""The Trainer and what a person meets around it."""
