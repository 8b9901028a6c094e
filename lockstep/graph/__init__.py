"""The model's layers, parameters and flows, as pure data."""
