"""What does not go with replicas that train apart and average, or with parameter servers."""

from torch import nn, optim

from lockstep.errors import OptionError, Problems
from lockstep.parallel.exchange.exchange_layout import sparse_weights
from lockstep.parallel.update import Updater
from lockstep.plan.makers.averaging import AveragedUpdate
from lockstep.plan.spec import Plan
from lockstep.train.optim.updater_sets import UpdaterSet
from lockstep.train.optim.wrapped_updaters import Averages, WrappedUpdater
from lockstep.units import first_few

_MIRRORED = "Use MirroredStrategy"
_KNOWN = "Use one of torch.optim without hooks, or of keras.optimizers without global_clipnorm."


def check_local_sgd(
    plan: Plan, updater: Updater, averages: Averages | None, precision: str
) -> None:
    """Refuse what replicas cannot do each for itself.

    Raises:
        OptionError: with all that they cannot.
    """
    if not isinstance(plan.update, AveragedUpdate):
        return
    problems = Problems()
    if isinstance(updater, UpdaterSet):
        problems.add(
            "Under LocalSGDStrategy a batch is one step, of one optimizer.",
            received="several training steps that take turns",
            fix=f"{_MIRRORED} for them.",
        )
    elif not updater.is_known:  # nor do hooks and methods of an instance travel
        problems.add(
            "Every replica steps an optimizer of its own, so LocalSGDStrategy must know how to "
            "copy it.",
            received=f"{type(updater.owner).__name__}, of which that is not known",
            fix=f"{_KNOWN} {_MIRRORED} for others.",
        )
    elif plan.update.averages_optimizer and not updater.is_elementwise:
        problems.add(
            "`average_optimizer` needs an optimizer whose slots are of the parameters' sizes.",
            received=type(updater.owner).__name__,
            fix="Leave it out, or use AdamW, for example.",
        )
    is_torch = isinstance(updater, UpdaterSet) or isinstance(updater.owner, optim.Optimizer)
    if not is_torch and (plan.update.outer is not None or plan.update.averages_optimizer):
        problems.add(
            "`outer` and `average_optimizer` need a PyTorch model and a Trainer.",
            received=f"a model of Keras, with {type(updater.owner).__name__}",
            fix="Leave them out.",
        )
    if not is_torch and plan.pipeline is not None:  # its slots lie where pipelines have them shared
        problems.add(
            "Pipelines that train apart need a PyTorch model and a Trainer.",
            received=f"a model of Keras, with {type(updater.owner).__name__}",
            fix="Leave `stages` out, or use HybridStrategy.",
        )
    if updater.options_spec() is not None:
        problems.add(
            "Replicas that train apart cannot follow a schedule that moves at every step.",
            received="a Schedule with every='step'",
            fix="Use every='epoch' for it, or MirroredStrategy.",
        )
    if averages is not None:
        problems.add(
            "Replicas that train apart have no moving average in common.",
            received="average=EMA(...) with LocalSGDStrategy",
            fix="Leave it out: the replicas' average is smooth itself.",
        )
    if precision == "bf16":
        problems.add(
            "Averages of bfloat16 weights would lose what replicas have learned.",
            received='precision="bf16" with LocalSGDStrategy',
            fix='Use precision="bf16-mixed", where weights are in float32.',
        )
    problems.raise_if_any(OptionError)


def check_parameter_server(plan: Plan, model: nn.Module, updater: Updater, precision: str) -> None:
    """Refuse what parameter servers cannot do, and without them what only they can.

    Raises:
        OptionError: with all that they cannot.
    """
    problems = Problems()
    if not plan.num_servers:
        if isinstance(updater.owner, optim.SparseAdam):
            problems.add(
                "Only parameter servers keep gradients sparse, as SparseAdam needs them.",
                received=f"SparseAdam with the strategy {plan.strategy!r}",
                fix="Use ParameterServerStrategy, or Adam.",
            )
        problems.raise_if_any(OptionError)
        return
    sparse = sorted(sparse_weights(model))
    is_kept_beside = isinstance(updater, WrappedUpdater) and updater.inner.takes_sparse
    if sparse and is_kept_beside:
        problems.add(
            "Sparse gradients change touched rows only, averages and float32 copies of the weights "
            "change in all rows.",
            received=f"sparse=True for {first_few(sparse)}, with `average` or precision='bf16'",
            fix="Leave out sparse=True, or the other.",
        )
    elif sparse and not updater.takes_sparse:
        problems.add(
            "The optimizer has no form for sparse gradients, in which only touched rows change.",
            received=f"{type(updater.owner).__name__}, and sparse=True for {first_few(sparse)}",
            fix="Use SparseAdam, or SGD or Adagrad without momentum and weight_decay; or leave out "
            "sparse=True.",
        )
    if not (updater.is_known or isinstance(updater, UpdaterSet)):
        problems.add(
            "Servers step copies of the optimizer, so ParameterServerStrategy must know how to "
            "copy it.",
            received=f"{type(updater.owner).__name__}, of which that is not known",
            fix=f"{_KNOWN} {_MIRRORED} for others.",
        )
    if plan.is_stale:
        _check_stale(problems, updater, precision)
    problems.raise_if_any(OptionError)


def _check_stale(problems: Problems, updater: Updater, precision: str) -> None:
    if isinstance(updater, UpdaterSet):
        problems.add(
            "Workers that do not wait have one step for a batch, of one optimizer.",
            received="several training steps that take turns",
            fix="Use staleness=0 for them.",
        )
    elif updater.options_spec() is not None:
        problems.add(
            "Workers that do not wait cannot follow a schedule that moves at every step.",
            received="a Schedule with every='step'",
            fix="Use every='epoch' for it, or staleness=0.",
        )
    if precision in ("bf16", "fp16-mixed"):
        problems.add(
            "Workers that do not wait have no loss scale in common, nor weights in bfloat16.",
            received=f'precision="{precision}" with a staleness other than 0',
            fix='Use precision="bf16-mixed", or staleness=0.',
        )
