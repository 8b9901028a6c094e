"""What a Trainer can say of a training without doing it: its Plan, and the Plan's proof."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from lockstep.data.map_style.sources import joined
from lockstep.errors import OptionError
from lockstep.launch.health.failure import ending_with
from lockstep.options import checks_names
from lockstep.plan.spec import Plan
from lockstep.tracebacks import public_methods
from lockstep.train.fit.fitting import FittingRunner
from lockstep.train.input.data_adapter import DEFAULT_BATCH_SIZE, DataOptions, adapt_data
from lockstep.train.input.stream_broadcast import sample_of
from lockstep.train.validation.checks import check_counts
from lockstep.units import listed


@public_methods
class ProvingRunner(FittingRunner):
    """A runner that shows its Plan and proves it.

    Attributes:
        _job_parts: loss, step and form of the data, as the user passed them.
    """

    _job_parts: dict[str, Any]

    @checks_names
    def plan_for(self, data: Any, y: Any = None, *, batch_size: int | None = None) -> Plan:
        """The Plan by which ``fit`` would train on this data, without training.

        Args:
            data: as in ``fit``. The first batch of an iterable is read.
            y: likewise.
            batch_size: likewise.

        Returns:
            The Plan for this host: ``print(plan)`` shows it.
        """
        (batch_size,) = check_counts({"batch_size": batch_size})
        wish = DataOptions(name="data", batch_size=batch_size, seed=self.seed, dims=self._dims)
        maker = self._maker()
        feed = adapt_data(joined(data, y, None), wish)
        with ending_with(feed.close), torch.inference_mode(False):
            maker.check_batch_size(feed.batch_size)
            samples = sample_of(feed.source)
            plan, _ = self._planning.plan(maker, self.precision, samples, feed.batch_size)
            return self._update_config.plan(plan)

    @checks_names
    def verify(
        self,
        data: Any,
        y: Any = None,
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        steps: int = 5,
        seed: int = 0,
        bits: bool = False,
        self_test: bool = False,
    ) -> Any:
        """Prove that the strategy gives the weights that one device would have given.

        Both sides train copies of the model and the optimizer in float64; the Trainer's own are not
        changed. Clipping, accumulation, averages and schedules are not part of the proof: the
        report lists those that the Trainer has.

        Args:
            data: as in ``fit``.
            y: likewise.
            batch_size: likewise.
            steps: see ``lockstep.verify``, as for the rest.
            seed: likewise.
            bits: likewise.
            self_test: likewise.

        Returns:
            The report of ``lockstep.verify``: ``print`` it, or ask ``report.passed``.

        Raises:
            OptionError: there is no strategy, loss or optimizer.
        """
        public = import_module("lockstep")  # at run time, since this floor imports none above it
        if self.strategy is None:
            raise OptionError(
                "verify compares a strategy with one device.",
                received="strategy=None",
                fix="Give the Trainer one: lockstep.MirroredStrategy(devices=2), for example.",
            )
        self._check_trainable()
        if self._update_config.train_step is None:
            self._need_loss("verify")
        self._initialize()
        job = public.Job(
            model=self.model,
            optimizer=self.optimizer,
            data=joined(data, y, None),
            batch_size=batch_size,
            **self._job_parts,
        )
        report = public.verify(
            job, self.strategy, steps=steps, seed=seed, bits=bits, self_test=self_test
        )
        left_out = self._options_not_proven()
        if not left_out:
            return report
        note = f"Of the Trainer's options these are not part of the proof: {listed(left_out)}."
        return replace(report, notes=(*report.notes, note))

    def _options_not_proven(self) -> list[str]:
        facts = self._update_config.facts()
        options = {
            "clip_norm": facts["clip_norm"] is not None,
            "clip_value": facts["clip_value"] is not None,
            "accumulate": facts["accumulate"] != 1,
            "average": facts["average"] is not None,
            "schedule": self.schedule is not None,
        }
        return [name for name, is_used in options.items() if is_used]
