"""What a few samples show of a compiled model, remembered for as long as the model is unchanged.

Rank 0 runs the model on these samples before other devices do: what its layers add to the loss, and
whether batches can be divided.
"""

from dataclasses import dataclass
from functools import partial

from lockstep.data.map_style.sources import ArraySource, Source
from lockstep.frontends.keras.layers.attributes import NO_SETTINGS, objects_with_settings
from lockstep.frontends.keras.layers.dry_run import few_samples, fixed_batch_size
from lockstep.frontends.keras.layers.metrics import KerasMetrics
from lockstep.frontends.keras.layers.model_fingerprint import (
    CompiledModelFingerprinter,
    ModelFingerprint,
)
from lockstep.frontends.keras.loss.add_loss import check_prediction, find_additions
from lockstep.frontends.keras.loss.computed_loss import loss_of
from lockstep.frontends.keras.loss.share_losses import Additions, KerasLoss
from lockstep.frontends.keras.model import KerasModel, giving_losses
from lockstep.parallel.data_parallel.forward import call_model, modes_of
from lockstep.parallel.independence.sample_independence import check_sample_independence
from lockstep.train.callbacks.change_detection import settings_of
from lockstep.train.input.stream_broadcast import SharedStream, sample_of
from lockstep.train.runtime.job_context import JobContext


@dataclass(frozen=True)
class _KnownLoss:
    """The loss of a model in one state.

    Attributes:
        key: the state; a model in another state is analysed again.
        loss: the model's. If a trial has shown that it needs whole batches, it asks for these.
        has_rows: see ``Additions``.
    """

    key: object
    loss: KerasLoss
    has_rows: bool


class ModelAnalysis:
    """Analyses a compiled model on rank 0, and remembers the result.

    Args:
        module: the model.
        job_context: the other processes that make the same calls.

    Attributes:
        is_independent: a trial has shown that the outputs of samples depend on no other samples.
    """

    def __init__(self, module: KerasModel, job_context: JobContext) -> None:
        self._module = module
        self._job_context = job_context
        self._fingerprinter = CompiledModelFingerprinter(module)
        self._fingerprint: ModelFingerprint | None = None
        self._is_current = False  # the fingerprint is newer than the last run on ranks
        self._known: _KnownLoss | None = None
        self.is_independent = False

    def expire(self) -> None:
        """The model may have changed: take its fingerprint again when it is next needed."""
        self._is_current = False

    def fingerprint(self) -> ModelFingerprint | None:
        """The model's state: the same object as before if nothing changed; None if unknown."""
        if not self._is_current:
            before, self._fingerprint = self._fingerprint, self._fingerprinter.take()
            self._is_current = True
            if self._fingerprint is None or self._fingerprint is not before:
                self._module.forget_direct_calls()
        return self._fingerprint

    def loss_and_metrics(
        self, source: Source | SharedStream, *, is_divided: bool, is_fit: bool
    ) -> tuple[KerasLoss, KerasMetrics]:
        """The model's losses and metrics, as they are compiled now.

        Args:
            source: the data.
            is_divided: batches are.
            is_fit: this is a ``fit``, which analyses a model without a fingerprint again.
        """
        model = self._module.model
        fingerprint = self.fingerprint()
        key = fingerprint or (
            model._compile_loss,
            settings_of(objects_with_settings(model), NO_SETTINGS) if is_divided else None,
            [one.requires_grad for one in self._module.parameters()],
        )
        known = self._known
        # Hosts analyse together and always: one of them may remember what another does not.
        is_due = (is_fit and fingerprint is None) or self._job_context.hosts is not None
        if is_due or known is None or known.key != key:
            additions = self._job_context.from_chief(
                self.find_additions(source, is_divided=is_divided)
            )
            assert additions is not None
            self.is_independent = False
            loss = loss_of(self._module, additions, is_divided=is_divided)
            self._known = known = _KnownLoss(key, loss, additions.has_rows)
        layers = model._flatten_layers(include_self=False)
        of_layers = [*model._metrics, *(one for layer in layers for one in layer._metrics)]
        metrics = KerasMetrics(model._compile_metrics, of_layers, has_rows=known.has_rows)
        return known.loss, metrics

    def find_additions(
        self, source: Source | SharedStream, *, is_divided: bool
    ) -> Additions | None:
        """What layers add to the loss; None where rank 0 is not."""
        if not self._job_context.is_chief:
            return None
        self._module.forget_direct_calls()
        sample = sample_of(source)
        assert isinstance(sample, ArraySource)
        return find_additions(self._module, sample, is_divided=is_divided)

    def check_prediction(self, source: Source | SharedStream) -> None:
        """Check that the model can predict on parts of a batch, unless that is known.

        Raises:
            ModelError: see ``add_loss.check_prediction``.
        """
        sample = sample_of(source)
        if not self.is_independent and self._job_context.is_chief:
            assert isinstance(sample, ArraySource)
            self._module.forget_direct_calls()
            check_prediction(self._module, sample)

    def check_independence(self, source: Source | SharedStream) -> None:
        """Check that in evaluation outputs depend on no other samples, unless that is known.

        In training, ranks check it with their own samples.
        """
        sample, module = sample_of(source), self._module
        if self.is_independent or not self._job_context.is_chief:
            return
        if isinstance(sample, ArraySource) and fixed_batch_size(module.model) is None:
            module.forget_direct_calls()
            with modes_of(module, training=False), giving_losses(module, True):
                check_sample_independence(
                    module, partial(call_model, module), few_samples(module, sample)
                )
        self.is_independent = True
