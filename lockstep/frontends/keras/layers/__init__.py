"""Keras models and layers: run, compared, checked and sent to helpers.

Entry points: ``checks``, ``dry_run`` and ``pickling``. ``fast_forward`` calls layers without
Keras's work around each of them.
"""
