"""Checks of options that local SGD, or parameter servers, cannot be combined with."""

from torch import nn, optim

from lockstep.errors import OptionError, Problems
from lockstep.formatting import first_few
from lockstep.parallel.exchange.exchange_layout import sparse_weights
from lockstep.parallel.updater_interface import Updater
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.spec import Plan
from lockstep.train.optim.optimizer_checks import class_of
from lockstep.train.optim.updater_sets import UpdaterSet
from lockstep.train.optim.wrapped_updaters import Averages, WrappedUpdater

_MIRRORED = "Use MirroredStrategy"
_KNOWN = "Use one of torch.optim without hooks, or of keras.optimizers without global_clipnorm."


def check_local_sgd(
    plan: Plan, updater: Updater, averages: Averages | None, precision: str
) -> None:
    """Check that each replica can train on its own.

    Raises:
        OptionError: with all that prevents it.
    """
    if not isinstance(plan.update, AveragedUpdate):
        return
    problems = Problems()
    if isinstance(updater, UpdaterSet):
        problems.add(
            "LocalSGDStrategy needs one training step and one optimizer.",
            received="several training steps that alternate",
            fix=f"{_MIRRORED} for them.",
        )
    elif not updater.is_known:  # hooks and methods of an instance are not sent, either
        problems.add(
            "LocalSGDStrategy must copy the optimizer for every replica.",
            received=f"{class_of(updater.owner)}, which it cannot copy",
            fix=f"{_KNOWN} {_MIRRORED} for others.",
        )
    elif plan.update.averages_optimizer and not updater.is_elementwise:
        problems.add(
            "`average_optimizer` needs an optimizer whose slots have the parameters' shapes.",
            received=type(updater.owner).__name__,
            fix="Leave it out, or use AdamW, for example.",
        )
    is_torch = isinstance(updater, UpdaterSet) or isinstance(updater.owner, optim.Optimizer)
    if not is_torch and (plan.update.outer is not None or plan.update.averages_optimizer):
        problems.add(
            "`outer` and `average_optimizer` need a PyTorch model and a Trainer.",
            received=f"a Keras model, with {type(updater.owner).__name__}",
            fix="Leave them out.",
        )
    if not is_torch and plan.pipeline is not None:  # replicas would share its slots
        problems.add(
            "LocalSGDStrategy with `stages` needs a PyTorch model and a Trainer.",
            received=f"a Keras model, with {type(updater.owner).__name__}",
            fix="Leave `stages` out, or use HybridStrategy.",
        )
    if updater.options_spec() is not None:
        problems.add(
            "Under LocalSGDStrategy replicas cannot follow a schedule that changes at every step.",
            received="a Schedule with every='step'",
            fix="Use every='epoch' for it, or MirroredStrategy.",
        )
    if averages is not None:
        problems.add(
            "Under LocalSGDStrategy replicas have no common moving average.",
            received="average=EMA(...) with LocalSGDStrategy",
            fix="Leave it out: the replicas' average is smooth itself.",
        )
    if precision == "bf16":
        problems.add(
            "Averages of bfloat16 weights would lose small updates of the replicas.",
            received='precision="bf16" with LocalSGDStrategy',
            fix='Use precision="bf16-mixed", which keeps weights in float32.',
        )
    problems.raise_if_any(OptionError)


def check_parameter_server(plan: Plan, model: nn.Module, updater: Updater, precision: str) -> None:
    """Check options that parameter servers cannot have, or that need parameter servers.

    Raises:
        OptionError: with all that is wrong.
    """
    problems = Problems()
    if not plan.num_servers:
        if isinstance(updater.owner, optim.SparseAdam):
            problems.add(
                "SparseAdam needs sparse gradients, which only parameter servers keep.",
                received=f"SparseAdam with the strategy {plan.strategy!r}",
                fix="Use ParameterServerStrategy, or Adam.",
            )
        problems.raise_if_any(OptionError)
        return
    sparse = sorted(sparse_weights(model))
    is_kept_beside = isinstance(updater, WrappedUpdater) and updater.inner.takes_sparse
    if sparse and is_kept_beside:
        problems.add(
            "Sparse gradients change only the rows used, but averages and float32 copies of the "
            "weights change in all rows.",
            received=f"sparse=True for {first_few(sparse)}, with `average` or precision='bf16'",
            fix="Leave out sparse=True, or the other.",
        )
    elif sparse and not updater.takes_sparse:
        problems.add(
            "The optimizer cannot apply sparse gradients to only the rows used.",
            received=f"{type(updater.owner).__name__}, and sparse=True for {first_few(sparse)}",
            fix="Use SparseAdam, or SGD or Adagrad without momentum and weight_decay; or leave out "
            "sparse=True.",
        )
    if not (updater.is_known or isinstance(updater, UpdaterSet)):
        problems.add(
            "ParameterServerStrategy must copy the optimizer for its servers.",
            received=f"{class_of(updater.owner)}, which it cannot copy",
            fix=f"{_KNOWN} {_MIRRORED} for others.",
        )
    if plan.is_stale:
        _check_stale(problems, updater, precision)
    problems.raise_if_any(OptionError)


def _check_stale(problems: Problems, updater: Updater, precision: str) -> None:
    if isinstance(updater, UpdaterSet):
        problems.add(
            "Asynchronous workers need one training step and one optimizer.",
            received="several training steps that alternate",
            fix="Use staleness=0 for them.",
        )
    elif updater.options_spec() is not None:
        problems.add(
            "Asynchronous workers cannot follow a schedule that changes at every step.",
            received="a Schedule with every='step'",
            fix="Use every='epoch' for it, or staleness=0.",
        )
    if precision in ("bf16", "fp16-mixed"):
        problems.add(
            "Asynchronous workers have no common loss scale, and no weights in bfloat16.",
            received=f'precision="{precision}" with a staleness other than 0',
            fix='Use precision="bf16-mixed", or staleness=0.',
        )
