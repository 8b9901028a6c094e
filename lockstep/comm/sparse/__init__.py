"""Rows of embeddings: only those that a batch touched are sent.

Entry points: ``sparse_rows`` (gradients) and ``row_versions`` (weights).
"""
