"""Starts processes, connects them, calls functions in them, and ends them; no models here."""
