"""Sealed connections between hosts."""
