"""Google's torch_tpu on hosts without a TPU: its runtime drives XLA's own plugin for CPUs.

With this folder in ``PYTHONPATH`` torch loads it when it is imported, so every process that
inherits that variable has two TPUs, "tpu:0" and "tpu:1". Correct, and slow.
"""

import warnings

NUM_CHIPS = 2


def register() -> None:
    """What torch calls at the end of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends another malloc
        from torch_tpu._internal.utils import hardware

        hardware.get_tpu_device_count = lambda: NUM_CHIPS

        from torch_tpu import _loader

        _loader._init_device("tpu")
