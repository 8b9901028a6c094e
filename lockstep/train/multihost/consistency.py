"""The facts that hosts compare before they train together, as texts by name.

Each host runs the user's script. If the scripts make different models, losses or options, training
would silently give wrong weights. So all that decides the result is described and compared; the
error names what differs.

Functions and classes are compared by name (``train.resume.stable_descriptions``). Attributes of the
user's own classes are not compared: they may differ between hosts, as the number of the host does.
Data are compared in ``train.input.same_data``.
"""

import msgspec
from torch import nn

from lockstep.train.resume.stable_descriptions import Facts, said, said_of_module
from lockstep.train.runtime.assignment import Assignment


def assignment_facts(assignment: Assignment) -> Facts:
    """All of an assignment that must be equal on all hosts, but for values."""
    loss, updater = assignment.loss, assignment.updater
    metrics = getattr(assignment.task, "metrics", None)
    return {
        **{f"the Plan's {name}": one for name, one in msgspec.to_builtins(assignment.plan).items()},
        **_model_facts(assignment.model),
        "the loss": "none" if loss is None else said(loss.loss),
        "the factors of the loss": "none" if loss is None else loss.parts.factors,
        "the optimizer": "none" if updater is None else said(updater.owner),
        "batch_dim": str(assignment.dims),
        "the metrics": "none" if metrics is None else said(metrics.by_name),
        "train_step": said([each.function for each in assignment.functions]),
    }


def _model_facts(model: nn.Module) -> Facts:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {
        **{
            f"the tensor {name!r}": f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
            for name, tensor in tensors
        },
        **{
            f"the layer {name!r}" if name else "the model": said_of_module("", module)
            for name, module in model.named_modules()
        },
    }
