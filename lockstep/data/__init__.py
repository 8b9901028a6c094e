"""Global batches and their shares: where samples come from and in which order."""

from lockstep.data.mnist import load_mnist

__all__ = ["load_mnist"]
