"""``OwnLoss`` declares that the model returns its own loss, and the loss's denominator.

Models like those of Hugging Face take labels as an input and return a loss beside their logits.
Only the denominator of such a loss must be known, and it depends only on the inputs. Training and
the reference of a proof each implement this declaration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LossError, OptionError


@dataclass(frozen=True)
class OwnLoss:
    """The model computes the loss, from its inputs.

    The model returns it as ``output.loss``, as ``output["loss"]``, as the first part of a tuple, as
    its whole output, or where ``output`` says. It is a scalar; without ``weight`` it may also be
    values of shape (n,) or a pair (total, weight).

    The denominator of a scalar is inferred if the scalar is one of torch's own losses, a ``mean()``
    or ``sum()``, or a sum divided by a count. Otherwise it must be the mean over the samples, or
    over the terms that ``weight`` counts: some shares are compared with their halves, and a
    difference is an error.

    Args:
        weight: ``weight(inputs)`` returns the number of terms of the mean for these inputs, such as
            ``lambda inputs: (inputs["labels"][:, 1:] != -100).sum()``; None to infer it.
        output: the position of the loss in the model's output, or its key or attribute: 1 for a
            model that returns (logits, loss).

    Raises:
        OptionError: ``weight`` cannot be called, or ``output`` is no position or key.
    """

    weight: Callable[[Any], Any] | None = None
    output: int | str | None = None

    def __post_init__(self) -> None:
        output: object = self.output
        if not isinstance(output, int | str | None) or isinstance(output, bool):
            raise OptionError(
                "`output` of OwnLoss must say where the loss is in what the model returns.",
                received=repr(output),
                fix="Pass a position, such as 1, or a key or attribute, such as 'loss'.",
            )
        weight: object = self.weight
        if weight is not None and (isinstance(weight, type) or not callable(weight)):
            raise OptionError(
                "`weight` of OwnLoss must be a function of the model's inputs.",
                received=repr(weight),
                fix="Pass OwnLoss.tokens(), or a function that counts the terms of the mean.",
            )

    @classmethod
    def tokens(
        cls,
        labels: str | int = "labels",
        *,
        ignore_index: int = -100,
        shift: bool = True,
        output: int | str | None = None,
    ) -> "OwnLoss":
        """A mean over the labels that count, as in language models.

        Args:
            labels: the input with the labels, shape (n, tokens): a name or a position.
            ignore_index: the label that does not count.
            shift: True if the model shifts labels to predict next tokens, so that the first label
                of every sample is not predicted.
            output: see the class.
        """
        return cls(_LabelCount(labels=labels, ignore_index=ignore_index, shift=shift), output)


@dataclass(frozen=True, kw_only=True)
class _LabelCount:
    """Counts labels."""

    labels: str | int
    ignore_index: int
    shift: bool

    def __call__(self, inputs: Any) -> Any:
        labels = self._find(inputs)
        counted = labels[:, 1:] if self.shift else labels
        return (counted != self.ignore_index).sum()

    def _find(self, inputs: Any) -> Any:
        whole: Any = inputs if isinstance(inputs, dict | tuple) else (inputs,)
        try:
            return whole[self.labels]
        except (KeyError, IndexError, TypeError) as error:
            raise LossError(
                "OwnLoss.tokens needs the labels among the inputs.",
                received=f"labels={self.labels!r} for inputs {_describe(whole)}",
                fix="Name the model's argument that takes them, or give its position.",
            ) from error


def _describe(inputs: Any) -> str:
    return f"{list(inputs)}" if isinstance(inputs, dict) else f"0 to {len(inputs) - 1}"
