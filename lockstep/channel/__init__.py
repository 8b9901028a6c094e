"""Sealed connections between hosts, and waits."""
