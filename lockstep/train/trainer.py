"""The Trainer: fit, evaluate, predict, save, load, the same under every strategy.

It never branches on the strategy: it captures the model, lets the strategy's maker make a Plan, and
runs tasks on the Plan's ranks through a ``Session``.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn

from lockstep.data.batch_dims import BatchDims
from lockstep.data.map_style.sources import joined
from lockstep.data.records.bad_records import OnBadRecord
from lockstep.data.trees import Tree
from lockstep.options import checks_names
from lockstep.parallel.data_parallel.gradient_rules import OnNonFinite
from lockstep.parallel.loss.loss_options import adapt_loss
from lockstep.plan.spec import Plan
from lockstep.tracebacks import public_methods
from lockstep.train.batch_size_search.batch_size import BatchSizeSearch
from lockstep.train.by_name import loss_named, metrics_named, optimizer_named
from lockstep.train.callbacks.callback import Callback, Logs
from lockstep.train.callbacks.interrupt import held_termination
from lockstep.train.checkpointing.checkpoints import Checkpoint, as_checkpoint
from lockstep.train.checkpointing.trainer_state import TrainerState
from lockstep.train.fit.fit_request import FitRequest
from lockstep.train.fit.fitting import Fit
from lockstep.train.fit.forward_passes import evaluate, predict
from lockstep.train.history import History
from lockstep.train.input.data_adapter import DEFAULT_BATCH_SIZE
from lockstep.train.logging.metrics import Metrics
from lockstep.train.model_making import check_scope, made_models
from lockstep.train.optim.learning_rates import RunningSchedule, make_schedule
from lockstep.train.optim.optimizers import Optimizers, make_optimizers
from lockstep.train.optim.rate_rules import rule_of
from lockstep.train.optim.update_config import UpdateConfig
from lockstep.train.optim.wrapped_updaters import EMA
from lockstep.train.part_attributes import of_part
from lockstep.train.plan_and_proof import plan_for, verify
from lockstep.train.representation import describe_trainer
from lockstep.train.resume.fit_checkpoints import FitCheckpoints
from lockstep.train.runtime.job_context import JobContext, StrategyLike
from lockstep.train.runtime.runner import Runner
from lockstep.train.scope import current_strategy
from lockstep.train.state_methods import StateMethods
from lockstep.train.torch_front_end import TorchFrontEnd
from lockstep.train.validation.checks import check_arguments


@public_methods
class Trainer(StateMethods):
    """Trains a PyTorch model under a strategy, with the weights one device would have given.

    Args:
        model: the model; it is trained in place. Or a function that makes it: then each rank of a
            pipeline makes only its own part, with values from its modules' ``reset_parameters``,
            and ``trainer.model`` is the whole by address.
        loss: ``loss(output, target)`` returning a scalar, values of shape (n,), or a pair (total,
            weight). A scalar that is not known to be a mean or a sum over the samples is computed
            on the outputs of the whole batch. Several, in a dict or list, each for the model's
            output and the target with its key or position. Or ``lockstep.OwnLoss()`` if the model
            returns its loss. Or a name of ``torch.nn.functional``: "cross_entropy", "mse". Needed
            for ``fit`` and ``evaluate``.
        optimizer: a torch optimizer over ``model.parameters()``, or a class or function that makes
            one from them, or the name of one of torch's, with its default options: "adam". Needed
            for ``fit``. Adam, AdamW and, on CPUs, Adagrad step in torch's fused form, unless they
            name a form (``fused=False``, ``foreach=True``).
        metrics: torchmetrics metrics by name; or names, such as ``["accuracy"]``, whose meaning
            follows from the loss.
        strategy: where and how to train; None is the strategy of the enclosing ``scope()``, else
            one device.
        precision: ``"fp32"``; ``"bf16-mixed"``, which keeps parameters, updates and the loss in
            float32 and lets the model compute in bfloat16 where that is safe (torch.autocast);
            ``"fp16-mixed"``, the same in float16 with a dynamic loss scale: steps whose gradients
            overflow are left out; ``"bf16"``, which casts parameters and buffers to bfloat16 and
            updates float32 copies of the parameters; or ``"fp64"``, which casts them to float64.
        seed: of the order of the samples and of all random numbers in training.
        clip_norm: largest norm of the gradient over all parameters, as in
            ``torch.nn.utils.clip_grad_norm_``; None for any.
        clip_value: largest element of a gradient; None for any.
        accumulate: parts into which each device divides its share of a batch, one after the other,
            to keep fewer activations at a time. It changes memory and time, and no result:
            ``batch_size`` is that of one update. Gradients of the parts are added up in place.
        on_nonfinite: for a step whose loss or gradient is NaN or infinite: ``"raise"`` ends the
            training before the update, and names the first layer; ``"skip"`` leaves the step out,
            on all ranks alike, and counts it (``"skipped_steps"`` in the history); ``"ignore"``
            updates with it.
        compile: compile the model with ``torch.compile`` on every rank, which takes seconds once
            and a C++ compiler on CPUs. In pipelines each stage is compiled, between the places
            where it sends and receives. Random numbers are those of the model as it is.
        deterministic: use only torch's deterministic kernels, on every rank, so that two runs on
            accelerators give the same bits; on CPUs they do anyway. torch raises an error that
            names an operation without such a kernel.
        average: ``lockstep.EMA(decay)`` to average the weights over the updates; within ``with
            trainer.averaged():`` the model has the averages.
        callbacks: called during every ``fit``.
        loss_weights: a factor for each of several losses, by key or in their order; 1 each by
            default.
        schedule: of the learning rate: a torch scheduler's class, a function that makes one from
            the optimizer, or one over the optimizer passed; or a ``lockstep.Schedule``, which says
            when it steps. The rate of every epoch's last update is in the logs as ``"lr"``.
        train_step: ``train_step(model, batch)``, which returns a loss as ``loss`` does, in place of
            ``loss(model(inputs), targets)`` in training; ``batch`` is a share of a batch, in the
            form of the data. Or several by name, which take turns with every batch, each with the
            optimizer of its name in ``optimizer``. For data parallel strategies.
        batch_dim: the dim of the samples: 1 in data with time first. For all inputs, targets and
            outputs; or a dict of "inputs", "targets" and "outputs", each a number, or numbers by
            position or name: ``{"inputs": {"x": 1, "edges": None}, "targets": 0, "outputs": 0}``.
            The default is 0; None is an input or output that belongs to no sample. In a tensor with
            fewer dims it is the last one. Samples of a Dataset are stacked along this dim.

    Attributes:
        batch_size: of the last ``fit``, as given or found; None before.

    Raises:
        OptionError: an argument is not valid.
        ModelError: the model cannot be trained as it is.
    """

    model: nn.Module = of_part("_front_end")
    strategy: Any = of_part("_runner")
    precision: str = of_part("_runner")
    seed: int = of_part("_runner")
    deterministic: bool = of_part("_runner")
    batch_size: int | None = of_part("_runner")
    optimizer: Any = of_part("_front_end")
    schedule: RunningSchedule | None = of_part("_front_end")
    metrics: Any = of_part("_front_end")
    stop_training: bool = of_part("_front_end")
    callbacks: list[Callback] = of_part("_state")

    @checks_names
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        loss: Any = None,
        optimizer: Any = None,
        metrics: Mapping[str, Any] | Sequence[str] | None = None,
        strategy: StrategyLike | None = None,
        precision: str = "fp32",
        seed: int = 0,
        callbacks: Sequence[Callback] = (),
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        on_nonfinite: OnNonFinite = "raise",
        average: EMA | None = None,
        compile: bool = False,
        deterministic: bool = False,
        loss_weights: Mapping[str, float] | Sequence[float] | None = None,
        schedule: Any = None,
        train_step: Any = None,
        batch_dim: Any = 0,
    ) -> None:
        dims = BatchDims.of(batch_dim)
        loss, optimizer = loss_named(loss), optimizer_named(optimizer)
        check_arguments(
            model, loss, loss_weights, strategy, precision, seed, deterministic, callbacks
        )
        update_config = UpdateConfig(
            precision=precision,
            clip_norm=clip_norm,
            clip_value=clip_value,
            accumulate=accumulate,
            on_nonfinite=on_nonfinite,
            average=average,
            compile=compile,
            schedule=schedule,
            train_step=dims.steps(train_step),
        )
        if strategy is None:
            strategy = current_strategy()
            check_scope(dims)
        with torch.inference_mode(False):  # tensors made there cannot be trained
            made, meta_model = made_models(model, precision)
            optimizer = make_optimizers(optimizer, made, train_step)
        found_metrics = Metrics(metrics_named(metrics, loss), dims, seed)
        if schedule is not None:
            one = None if isinstance(optimizer, Optimizers) else optimizer
            schedule = make_schedule(schedule, one)
        self._front_end = TorchFrontEnd(
            made,
            loss=None if loss is None else adapt_loss(dims.loss(loss), loss_weights),
            optimizer=optimizer,
            schedule=schedule,
            metrics=found_metrics,
            update_config=update_config,
        )
        self._runner = Runner(
            self._front_end,
            meta_model=meta_model,
            job_context=JobContext(strategy),
            strategy=strategy,
            update_config=update_config,
            precision=precision,
            seed=seed,
            dims=dims,
            deterministic=deterministic,
        )
        self._state = TrainerState(self._runner, callbacks)
        self._checkpoints = FitCheckpoints(self._state)
        self._job_parts = {
            "loss": loss,
            "loss_weights": loss_weights,
            "train_step": train_step,
            "batch_dim": batch_dim,
        }

    def __repr__(self) -> str:
        return describe_trainer(self, self._front_end.loss)

    def log_names(self) -> list[str]:
        """Names of the values that an epoch of this ``fit``, or of the last one, may have.

        Before the first ``fit`` those of validation are among them.
        """
        return self._front_end.all_log_names()

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale, with ``precision="fp16-mixed"``."""
        scale = self._runner.update_config.rules.loss_scale
        return None if scale is None else scale.scale

    @property
    def timeout_seconds(self) -> float:
        """Longest wait for a helper, by the strategy."""
        return self._runner.timeout_seconds

    @property
    def plan(self) -> Plan:
        """The Plan of the last call, or the one a ``fit`` with the default batch would have.

        Raises:
            OptionError: before the first call, if the Plan depends on the cost of layers.
        """
        return self._runner.plan

    def close(self) -> None:
        """End the helper processes now instead of with the trainer."""
        self._runner.close()

    @checks_names
    def fit(
        self,
        data: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | Literal["auto"] | BatchSizeSearch | None = None,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        validation_split: float = 0.0,
        sample_weight: Any = None,
        shuffle: bool | None = None,
        verbose: int = 1,
        learning_rate_rule: Literal["linear", "sqrt"] | None = None,
        reference_batch_size: int = DEFAULT_BATCH_SIZE,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        restarts: int = 0,
        on_bad_record: OnBadRecord = "error",
        record: str | os.PathLike[str] | None = None,
        on_snapshot: Any = None,
    ) -> History:
        """Train; a second ``fit`` continues where the first ended.

        Args:
            data: ``(inputs, targets)`` or ``(inputs, targets, sample_weight)`` of arrays or tensors
                whose first dim is the samples, or a map-style Dataset of such items. A tuple of
                inputs is the model's positional arguments, a dict its keyword arguments. Without
                targets, for a model that computes its own loss: ``(inputs,)`` or a dict of inputs.
                Or global batches of these forms, from a DataLoader, an iterable, a function that
                makes a new iterator for every epoch, an iterator, or a ``tf.data.Dataset``; or an
                IterableDataset of samples. These are read on this process alone, in their order.
            y: the targets, if ``data`` is the inputs alone.
            epochs: the number of epochs.
            batch_size: samples of a global batch, over all devices together; None is 32, or the
                data's own. ``"auto"`` is the fastest per sample on this machine, found by trial and
                remembered; or pass a ``BatchSizeSearch``.
            steps_per_epoch: batches of an epoch; the next epoch continues in the data from there.
                None is a pass over the data.
            validation_data: as ``data``; evaluated after every epoch.
            validation_split: the part (0 to 1) of arrays or tensors that is evaluated after every
                epoch and not trained on: the last samples, before they are shuffled.
            sample_weight: of each sample, where ``y`` is given.
            shuffle: take the samples in a new order every epoch, a function of seed and epoch
                alone; None is True for data without an order of its own.
            verbose: 1 shows progress, 0 is silent.
            learning_rate_rule: ``"linear"`` or ``"sqrt"`` multiplies the learning rate of every
                parameter group by ``batch_size / reference_batch_size``, or by its square root:
                once, and by the ratio when a later ``fit`` has the rule and another size.
            reference_batch_size: the batch size that the learning rates were chosen for.
            checkpoint: a folder for the whole state of training, written after every epoch or as a
                Checkpoint says. The same script, started again, resumes from the newest at the very
                next batch, on any number of devices; a ``fit`` that had ended returns its history.
            restarts: how often to resume, to the same bits, after a process was killed or did not
                answer for ``timeout_seconds`` of the strategy. One host resumes with fresh helpers
                from the last copy of the training in memory, which takes memory for a second copy
                of weights and optimizer, and at most 2 % of the time. Several hosts need
                ``checkpoint``, too: the remaining hosts wait until all have come back, and resume
                from the newest checkpoint, on disk or in the memory of host 0 or 1.
            on_bad_record: for samples of map-style datasets that cannot be read, or differ in
                shapes or types from the first readable one: ``"error"`` ends the training with a
                BadRecordError; ``"skip"`` leaves the sample out of its batch, on all ranks alike,
                and counts it (``"bad_records"`` in the history).
            record: folder for ``record.jsonl``, from which ``lockstep doctor`` tells what went
                wrong; None is the checkpoint's, or ``LOCKSTEP_RECORD``'s, or none.
            on_snapshot: for proofs; slow. Called after every step with a Snapshot
                (``train.callbacks.driver``): gradients, every rank's state, the optimizer's slots,
                and in the steps of its attribute ``look``, if it has one, the modules' values.

        Returns:
            Loss, metrics and validation values of every epoch.

        Raises:
            OptionError, DataError, DeviceError, PlanError, ShippingError: before a process starts.
            LossError, NonFiniteError: at the step they name.
            CheckpointError: no checkpoint there is complete, or they are of another fit.
            OSError: a checkpoint cannot be written; raised at the next one, or at the end.
            Exception: the model, loss or data raised it, on any rank; a note names the rank.
            WorkerError: a helper died or hung, or raised an error that cannot be sent here.
            HostError: another host failed or was lost, and no restart is left.
            KeyboardInterrupt: after Ctrl-C and the end of the running step, with weights and
                optimizer as that step left them; at once after a second Ctrl-C.
        """
        asked = FitRequest(
            data=joined(data, y, sample_weight),
            epochs=epochs,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            validation_data=validation_data,
            validation_split=validation_split,
            shuffle=shuffle,
            verbose=verbose,
            rule=rule_of(learning_rate_rule, reference_batch_size),
            checkpoint=as_checkpoint(checkpoint),
            restarts=restarts,
            on_bad_record=on_bad_record,
            record=record,
            on_snapshot=on_snapshot,
        )
        with nullcontext() if checkpoint is None else held_termination():
            return Fit(self, self._front_end, self._checkpoints, asked).run()

    @checks_names
    def evaluate(
        self,
        data: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
    ) -> Logs:
        """Loss and metrics over ``data``, every sample counted once.

        Args:
            data: as in ``fit``.
            y: likewise.
            batch_size: samples of a global batch; None is 32, or the data's own.
            sample_weight: as in ``fit``.

        Returns:
            ``{"loss": ..., <metric>: ...}``.
        """
        data, loss = joined(data, y, sample_weight), self._front_end.loss_for
        return self._runner.call(
            "evaluate",
            lambda: evaluate(
                self._runner, data, batch_size, loss("evaluate"), self.metrics, self._call_callbacks
            ),
        )

    @checks_names
    def predict(self, inputs: Any, *, batch_size: int | None = None) -> Tree:
        """The model's outputs for ``inputs``, in their order.

        Args:
            inputs: arrays or tensors, a tuple of them (positional arguments) or a dict (keyword
                arguments), or a Dataset, DataLoader or other iterable of batches as in ``fit``; of
                items that are tuples, the first part is taken.
            batch_size: samples of a global batch; None is 32, or the data's own.

        Returns:
            The model's outputs, with all samples along the first dim of every tensor.
        """
        return self._runner.call(
            "predict", lambda: predict(self._runner, inputs, batch_size, self._call_callbacks)
        )

    def _call_callbacks(self, method: str, *args: Any) -> None:
        for callback in self._state.own_callbacks:
            callback.set_trainer(self)
            getattr(callback, method)(*args)

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
        return plan_for(self._runner, joined(data, y, None), batch_size)

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
        setup = {"steps": steps, "seed": seed, "bits": bits, "self_test": self_test}
        job = {**self._job_parts, "data": joined(data, y, None), "batch_size": batch_size}
        return verify(self._runner, self._front_end, job, setup)
