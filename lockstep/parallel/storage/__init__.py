"""The memory of parameters, gradients and optimizer slots.

Entry points: ``store`` (shared memory of one host) and ``device_store`` (memory of accelerators).
``meta_init`` builds models that are distributed over ranks.
"""
