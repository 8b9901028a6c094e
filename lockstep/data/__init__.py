"""Global batches and their shares: the sources of samples, and their order."""

from lockstep.data.iterable.read_ahead import prefetch
from lockstep.data.map_style.named_columns import columns
from lockstep.data.mnist import load_mnist
from lockstep.data.records.sample_cache import cache

__all__ = ["cache", "columns", "load_mnist", "prefetch"]
