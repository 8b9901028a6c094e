"""``Trainer.load``: each rank of a divided training reads its part of a file of weights.

Where this process has all weights anyway, or a Plan needs samples, it reads them alone.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from lockstep.capture.layers import capture_layers
from lockstep.checkpoint.weights import load_weights
from lockstep.cluster.devices import discover
from lockstep.errors import CheckpointError, OptionError
from lockstep.parallel.storage.meta_init import blank_names
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.checkpointing.partitioned_state import keeps_parts
from lockstep.train.checkpointing.shared_folder import SharedFolder
from lockstep.train.input.data_adapter import DEFAULT_BATCH_SIZE
from lockstep.train.resume.part_loading import LoadTask
from lockstep.train.runtime.runner import Runner


def load_everywhere(runner: Runner, path: str | os.PathLike[str]) -> None:
    """Load a file of weights into a model, in all processes; see ``Trainer.load``."""
    runner.shared(partial(_load, runner, path))


def _load(runner: Runner, path: str | os.PathLike[str]) -> None:
    """By the process that leads this host."""
    hosts, release_pages = runner.job_context.hosts, runner.session.stores.release_pages
    names = _names_in_parts(runner)
    if names and (runner.job_context.num_hosts == 1 or SharedFolder.find(hosts, Path(path).parent)):
        divided = {name for own in names.values() for name in own}
        load_weights(runner.model, path, release_pages, without=divided)
        _load_parts(runner, path, {parameter: own[0] for parameter, own in names.items()})
        release_pages()
        return
    runner.initialize()
    if runner.is_chief:
        load_weights(runner.model, path, release_pages)
    if hosts is not None:
        hosts.share_values(runner.model, None)


def _load_parts(runner: Runner, path: str | os.PathLike[str], names: Mapping[str, str]) -> None:
    task = LoadTask(source=None, place=os.path.abspath(path), weights=names)
    updater, batch_size = runner.make_updater(), runner.batch_size or DEFAULT_BATCH_SIZE
    reason: str = runner.run(task, None, updater, TaskDriver(), batch_size)
    if reason:
        raise CheckpointError(
            f"{os.fspath(path)} could not be read to its end.",
            received=reason,
            fix="Load weights again: some parameters have new values, others have not.",
        )


def _names_in_parts(runner: Runner) -> dict[str, list[str]]:
    """The parameters of which each rank can read its part, with their names in files.

    There are none if this process must read all.
    """
    if not _divides(runner):
        return {}
    named = dict(runner.model.named_parameters())
    trained = {name: one for name, one in named.items() if one.requires_grad}
    state = runner.model.state_dict(keep_vars=True)
    names = {
        name: [own for own, value in state.items() if value is parameter]
        for name, parameter in trained.items()
    }
    all_fit = all(names.values()) and all(one.is_contiguous() for one in trained.values())
    # Ranks that make a model leave out what they do not train.
    is_made = bool(blank_names(runner.model)) and len(trained) < len(named)
    return names if all_fit and not is_made else {}


def _divides(runner: Runner) -> bool:
    """Whether each rank has only its part of the weights while it trains."""
    context, maker = runner.job_context, runner.maker()
    if context.is_nested or runner.front_end.optimizer is None:
        return False
    cluster, batch_size = context.cluster or discover(), runner.batch_size or DEFAULT_BATCH_SIZE
    try:
        needs_samples = maker.sample_size(cluster, batch_size) is not None
        if needs_samples or maker.num_tensor_shards(cluster) is not None:
            return False
        return keeps_parts(maker(capture_layers(runner.model), cluster, batch_size))
    except OptionError:
        return False  # ``fit`` will say why there is no such Plan
