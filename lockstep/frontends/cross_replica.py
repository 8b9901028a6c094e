"""``CrossReplicaOptimizer``, for the optimizers of every library."""

import sys
from typing import Any, Self

from torch import nn

from lockstep.custom_loops.optimizer import TorchReplicaOptimizer
from lockstep.tracebacks import public_methods


@public_methods
class CrossReplicaOptimizer(TorchReplicaOptimizer):
    """Wraps an optimizer of PyTorch or Keras: steps on the gradient of all replicas' samples.

    All replicas must make it together: they get the first one's parameters. On one host these then
    lie in one place, so only ``step`` may change them.

    For a Keras optimizer it has Keras's methods, such as ``apply``, beside ``step`` and the other
    methods here.

    Args:
        optimizer: over the model's parameters. Its options are those of the first replica at each
            step: schedulers may be made over either of the two.
        model: its other parameters and buffers are made equal, too, and its names are used in
            errors. A Keras optimizer needs it.
        clip_norm: the largest norm of the gradient of all parameters; None for no limit.
        accumulate: how many calls of ``step`` make one update.

    Raises:
        OptionError: an invalid argument; an optimizer that cannot step across replicas; on all
            replicas, models or optimizers that differ.
        DeviceError: parameters on several devices, or replicas that share an accelerator.
        ModelError: parameters that share memory without being one Parameter; a Keras model that is
            not built.
        WorkerError: another replica does not come.
    """

    def __new__(cls, optimizer: Any = None, model: nn.Module | None = None, **options: Any) -> Self:
        """For a Keras optimizer, a ``KerasReplicaOptimizer``; else an instance of this class."""
        keras = sys.modules.get("keras")
        if keras is None or not isinstance(optimizer, keras.optimizers.Optimizer):
            return super().__new__(cls)
        from lockstep.frontends.keras.optim.replica_optimizer import KerasReplicaOptimizer

        return KerasReplicaOptimizer(optimizer, model, **options)  # type: ignore[return-value]
