"""Global batches and their shares: where samples come from and in which order."""

from lockstep.data.columns import columns
from lockstep.data.mnist import load_mnist

__all__ = ["columns", "load_mnist"]
