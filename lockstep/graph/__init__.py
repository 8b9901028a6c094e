"""What the model is, as pure data."""
