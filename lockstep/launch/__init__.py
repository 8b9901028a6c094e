"""How processes start, talk, and end. Runs a callable; knows nothing of models."""
