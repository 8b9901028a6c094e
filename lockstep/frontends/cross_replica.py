"""``CrossReplicaOptimizer``, for the optimizers of every library."""

import sys
from typing import Any, Self

from torch import nn

from lockstep.custom_loops.optimizer import TorchReplicaOptimizer
from lockstep.tracebacks import public_methods


@public_methods
class CrossReplicaOptimizer(TorchReplicaOptimizer):
    """Wraps an optimizer of PyTorch or Keras: steps on the gradient of all replicas' samples.

    Making it is a call of all replicas: the first one's parameters become everybody's. On one host
    they lie in one place from then on, so only ``step`` may change them.

    Of a Keras optimizer it is one with Keras's methods, such as ``apply``, beside ``step`` and the
    other methods here.

    Args:
        optimizer: over the model's parameters. Its options are those of the first replica at each
            step: schedulers may be made over either of the two.
        model: whose other parameters and buffers are made equal, too, and whose names errors say.
            A Keras optimizer needs it.
        clip_norm: longest gradient, all parameters' together; None for any length.
        accumulate: how many calls of ``step`` make one update.

    Raises:
        OptionError: an argument that cannot be; an optimizer that cannot step so; on all replicas,
            models or optimizers that differ.
        DeviceError: parameters that are not on the CPU.
        ModelError: parameters that share memory without being one Parameter; a Keras model that is
            not built.
        WorkerError: another replica does not come.
    """

    def __new__(cls, optimizer: Any = None, model: nn.Module | None = None, **options: Any) -> Self:
        """Of a Keras optimizer, what steps that; else one of these."""
        keras = sys.modules.get("keras")
        if keras is None or not isinstance(optimizer, keras.optimizers.Optimizer):
            return super().__new__(cls)
        from lockstep.frontends.keras.optim.replica_optimizer import KerasReplicaOptimizer

        return KerasReplicaOptimizer(optimizer, model, **options)  # type: ignore[return-value]
