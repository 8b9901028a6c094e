"""Serializes an assignment for the helpers, without the tensors that ranks share."""

from collections.abc import Sequence
from typing import Any

from lockstep.errors import OptionError
from lockstep.formatting import first_few
from lockstep.launch.workers.link import MOST_DESCRIPTORS
from lockstep.parallel.storage.store import TensorStore
from lockstep.parallel.transfer.pickle_errors import pack_named
from lockstep.parallel.transfer.serialization import SerializedObject, parameters_in
from lockstep.train.runtime.assignment import Assignment


def pack_assignment(assignment: Assignment, stores: Sequence[TensorStore]) -> SerializedObject:
    """Serialize an assignment without what is in the stores.

    Raises:
        ShippingError: a part of it, named in the message, cannot be sent.
    """
    parts: dict[str, Any] = {
        "the model": assignment.model,
        "the loss": assignment.loss and assignment.loss.loss,
        **{f"the {name}": value for name, value in vars(assignment.task).items()},
        "the optimizer": assignment.updater,
        "train_step": [each.function for each in assignment.functions],
    }
    parameters = dict(assignment.model.named_parameters())
    known = [
        parameters.get(spec.name, view)
        for store in stores
        for spec, view in zip(store.specs, store.views, strict=True)
    ]
    return pack_named(assignment, parts, known)


def check_loss(assignment: Assignment) -> None:
    """Refuse a loss that uses parameters which its stage lacks.

    Raises:
        OptionError: with their names.
    """
    pipeline = assignment.plan.pipeline
    if pipeline is None or assignment.loss is None:
        return
    last = set(pipeline.stages[-1].ranks)
    elsewhere = {
        name for group in assignment.groups if not last <= set(group.ranks) for name in group.names
    }
    named = list(assignment.model.named_parameters())
    try:
        numbers = parameters_in(assignment.loss.loss, [parameter for _, parameter in named])
    except Exception:  # it cannot be sent: pack_assignment says what and why
        return
    strange = [named[number][0] for number in numbers if named[number][0] in elsewhere]
    if strange:
        raise OptionError(
            "In a pipeline the loss is computed by the last stage, which has its own "
            "parameters only.",
            received=f"a loss that uses {first_few(strange)}",
            fix="Leave penalties on weights to the optimizer (weight_decay), or use a data "
            "parallel strategy.",
        )


def check_number(num_regions: int) -> None:
    """Refuse more regions than one message carries; that is enough for a hundred stages.

    Raises:
        OptionError: there are more.
    """
    if num_regions > MOST_DESCRIPTORS:
        raise OptionError(
            f"A plan can have at most {MOST_DESCRIPTORS} regions of shared memory: two for "
            "each set of stages that have parameters in common.",
            received=f"{num_regions}",
            fix="Use fewer stages.",
        )
