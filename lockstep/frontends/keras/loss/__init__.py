"""Keras losses as what a share contributes to the loss of the global batch.

Entry point: ``share_losses``.
"""
