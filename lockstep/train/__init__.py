"""The Trainer, and what users see around it."""
