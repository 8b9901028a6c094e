"""Where parameters, gradients and optimizer slots are in memory.

Entry points: ``store`` (shared memory of one host) and ``device_store`` (memory of accelerators).
``meta_init`` builds models of which each rank holds a part.
"""
