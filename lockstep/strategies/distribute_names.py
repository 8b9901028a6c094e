"""Names of tf.distribute that strategies here do not have, and what to write instead.

A script from tf.distribute gets this advice at the first such name instead of an AttributeError.
"""

from lockstep.errors import OptionError

_LOOP = (
    "Put the step into train_step of a Keras model, or into lockstep.Trainer(train_step=...), and "
    "call fit; or write the loop for one replica with lockstep.init() and "
    "lockstep.CrossReplicaOptimizer, and start it with `lockstep run` (docs/own-loops.md)."
)
_VALUES = (
    "The results of fit, evaluate and predict cover all samples already. In a loop of your own, "
    "lockstep.all_mean(value, weight) is the mean over all replicas."
)
_DATA = (
    "Pass fit a dataset of global batches: each is divided among the replicas. In a loop of your "
    "own, lockstep.share(batch) is this replica's part."
)
_PLACE = (
    "The launcher's variables (TF_CONFIG, torchrun's, Slurm's) are read where a strategy is made: "
    "see strategy.is_chief, and print(strategy.plan(model, batch_size=...))."
)

_INSTEAD = {
    "run": _LOOP,
    "experimental_run_v2": _LOOP,
    "reduce": _VALUES,
    "gather": _VALUES,
    "experimental_local_results": _VALUES,
    "distribute_datasets_from_function": _DATA,
    "experimental_distribute_datasets_from_function": _DATA,
    "experimental_distribute_values_from_function": _DATA,
    "make_dataset_iterator": _DATA,
    "make_input_fn_iterator": _DATA,
    "cluster_resolver": _PLACE,
    "extended": _PLACE,
    "configure": _PLACE,
}


class NotThereError(OptionError, AttributeError):
    """A name of tf.distribute; an AttributeError, so that ``hasattr`` returns False."""


def missing(kind: str, name: str) -> AttributeError:
    """The error for a name that a strategy lacks."""
    if name not in _INSTEAD:
        return AttributeError(f"{kind!r} object has no attribute {name!r}")
    return NotThereError(
        "Lockstep's strategies lack this name, which those of tf.distribute have.",
        received=f"{kind}.{name}",
        fix=_INSTEAD[name],
    )
