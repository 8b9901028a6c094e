"""Proofs: any strategy, step by step, against a plain loop on one device."""
