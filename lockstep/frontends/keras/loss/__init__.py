"""Keras losses as the contributions of shares to the loss of the global batch.

Entry point: ``share_losses``.
"""
