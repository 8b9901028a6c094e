"""Users' own training steps, for models that do not map inputs to outputs.

A function gets the model and a share of the batch and returns the share's loss, in one of the three
forms of a loss. Several functions take turns with every batch, each with its own optimizer (the two
halves of a GAN): a turn is a whole step, with passes, sum and update, on the parameters of its
optimizer. During a turn the other parameters need no gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lockstep.data.map_style.sources import Batch
from lockstep.errors import LossError
from lockstep.parallel.loss.model_loss_reduction import InnerMeans
from lockstep.parallel.loss.model_losses import InnerLoss
from lockstep.parallel.loss.share_losses import ShareLoss


@dataclass(frozen=True, kw_only=True)
class StepFunction:
    """A function and the parameters that it trains.

    Attributes:
        function: ``function(model, batch) -> loss``.
        parameters: names of its optimizer's parameters; None for all.
        reader: of the losses that it returns.
    """

    function: Callable[[nn.Module, Any], Any]
    parameters: frozenset[str] | None = None
    reader: InnerLoss = field(default_factory=InnerLoss, compare=False)

    def loss_of(self, model: nn.Module, batch: Batch, batch_size: int) -> ShareLoss:
        """The loss of a share, in a global batch of ``batch_size`` samples.

        Raises:
            LossError: the function returned none of the documented forms.
        """
        with InnerMeans():
            returned = self.function(model, batch.as_given)
        is_scalar = getattr(returned, "dim", lambda: -1)() == 0
        if batch.sample_weight is not None and is_scalar:
            raise LossError(
                "With sample_weight, train_step must return the weight of its loss.",
                received="a scalar",
                fix="Return (sum of weight times loss, sum of weight). If the third part of the "
                "data is not a weight, put it beside the inputs: ((inputs, others), targets).",
            )
        return self.reader.read(returned, returned, batch.num_samples, batch_size)

    @contextmanager
    def training(self, model: nn.Module) -> Iterator[None]:
        """Within the block only the function's own parameters need gradients."""
        others = [
            parameter
            for name, parameter in model.named_parameters()
            if self.parameters is not None
            and name not in self.parameters
            and parameter.requires_grad
        ]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)
