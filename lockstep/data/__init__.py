"""Global batches and their shares: where samples come from and in which order."""

from lockstep.data.mnist import load_mnist
from lockstep.data.named_columns import columns
from lockstep.data.read_ahead import prefetch
from lockstep.data.sample_cache import cache

__all__ = ["cache", "columns", "load_mnist", "prefetch"]
