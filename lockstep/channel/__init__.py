"""Encrypted connections between hosts; waits, and threads that wait in the background."""
