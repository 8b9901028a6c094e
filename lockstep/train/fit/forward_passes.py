"""``evaluate`` and ``predict``: forward passes over data, on all ranks."""

import copy
from collections.abc import Callable
from typing import Any

from lockstep.data.trees import Tree, concatenate, map_tensors
from lockstep.launch.health.failure import ending_with
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.train.callbacks.callback import Logs
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.fit.tasks import DataPass, EvaluateTask, MeansOfSamples, PredictTask
from lockstep.train.input.data_adapter import DataOptions, DataPipeline, adapt_data
from lockstep.train.input.stream_broadcast import sample_of
from lockstep.train.logging.metrics import Metrics
from lockstep.train.model_making import made_up_sample
from lockstep.train.runtime.runner import Runner
from lockstep.train.validation.checks import check_counts, check_targets

# Calls a method of all callbacks, with arguments.
CallCallbacks = Callable[..., None]


def evaluate(
    runner: Runner,
    data: Any,
    batch_size: int | None,
    loss: LossAdapter,
    metrics: Metrics,
    call_callbacks: CallCallbacks,
) -> Logs:
    """Loss and metrics over data; see ``Trainer.evaluate``."""
    feed = _adapted(runner, data, "data", batch_size)
    check_targets(sample_of(feed.source), loss, metrics)
    # Within a fit, the user's metrics are busy with the training data.
    metrics = metrics.for_validation
    metrics = copy.deepcopy(metrics) if runner.job_context.is_rank_zero_only else metrics
    task = EvaluateTask(
        data=DataPass(source=feed.source, batch_size=feed.batch_size),
        metrics=metrics,
        evaluation=MeansOfSamples(loss.parts),
    )
    call_callbacks("on_test_begin")
    with ending_with(feed.close):
        logs: Logs = runner.run(task, loss, None, TaskDriver(), feed.batch_size)
    logs = runner.job_context.from_chief(logs)
    call_callbacks("on_test_end", logs)
    return logs


def predict(
    runner: Runner, inputs: Any, batch_size: int | None, call_callbacks: CallCallbacks
) -> Tree:
    """The model's outputs; see ``Trainer.predict``."""
    feed = _adapted(runner, inputs, "inputs", batch_size, with_targets=False)
    call_callbacks("on_predict_begin")
    with ending_with(feed.close):
        outputs = _predict_none(runner, feed) if feed.num_steps == 0 else _predict(runner, feed)
        outputs = runner.dims.given_outputs(outputs)
    call_callbacks("on_predict_end")
    return outputs


def _adapted(
    runner: Runner, data: Any, name: str, batch_size: int | None, *, with_targets: bool = True
) -> DataPipeline:
    (batch_size,) = check_counts({"batch_size": batch_size})
    options = DataOptions(
        name=name,
        batch_size=batch_size,
        seed=runner.seed,
        with_targets=with_targets,
        is_read_here=runner.is_chief,
        dims=runner.dims,
    )
    return runner.job_context.agreed_feed(adapt_data(data, options))


def _predict(runner: Runner, feed: DataPipeline) -> Tree:
    task = PredictTask(data=DataPass(source=feed.source, batch_size=feed.batch_size))
    parts = runner.run(task, None, None, TaskDriver(), feed.batch_size)
    return runner.job_context.from_chief(concatenate(parts) if runner.is_chief else None)


def _predict_none(runner: Runner, feed: DataPipeline) -> Tree:
    """No samples: outputs of the right kind and shape, found with one made-up sample."""
    sample = made_up_sample(feed.source)
    outputs = _predict(runner, DataPipeline(source=sample, batch_size=1, num_steps=1))
    return map_tensors(lambda tensor: tensor[:0], outputs)
