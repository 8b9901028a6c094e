"""Changes besides values that a callback on host 0 made between epochs, sent to other hosts.

Processes of one host are sent the whole model anew (``train.callbacks.change_detection``). Between
hosts nothing is pickled, so only plain values are sent: which parameters are trained, modes and
attributes of modules, which parameters the optimizer has. Other changes are refused, by name.

Not detected: a change inside an object of the user's own class that a module holds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn, optim

from lockstep.comm.codec.message_codec import encode
from lockstep.errors import OptionError, ShippingError
from lockstep.formatting import first_few

# Attributes of a module whose contents are compared by themselves.
_MEMBERS = ("_parameters", "_buffers", "_modules")


class ModelLayout:
    """A model and its optimizers at one time, without the values of tensors.

    Args:
        model: the model.
        optimizers: of its parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> None:
        names = {id(one): name for name, one in model.named_parameters()}
        self._parts = {
            (name, member): {key: id(one) for key, one in vars(module)[member].items()}
            for name, module in model.named_modules()
            for member in ("_parameters", "_modules")
        }
        self._attributes = {
            (name, key): (value, _encoded(value))
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key not in _MEMBERS
        }
        self._trained = {name: one.requires_grad for name, one in model.named_parameters()}
        self._groups = [
            [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]

    def changes(self, later: "ModelLayout") -> dict[str, Any]:
        """The changes since then, as they are sent to the other hosts.

        Raises:
            OptionError: a change that cannot be sent.
        """
        attributes = {}
        strange = [
            _shown(*place)
            for place in {**self._parts, **later._parts}
            if self._parts.get(place) != later._parts.get(place)
        ]
        for place, (value, encoded) in later._attributes.items():
            before, encoded_before = self._attributes.get(place, (None, b""))
            if encoded is None or encoded_before is None:
                strange += [_shown(*place)] if value is not before else []
            elif encoded != encoded_before:
                attributes[place] = value
        strange += [_shown(*place) for place in self._attributes.keys() - later._attributes.keys()]
        if strange:
            raise OptionError(
                "On several hosts a callback may change only weights, buffers, requires_grad, "
                "modes, numbers and texts of modules, and the optimizer's groups and state.",
                received=f"a change of {first_few(sorted(strange))}",
                fix="Make that change in the script, between two calls of fit.",
            )
        return {"attributes": attributes, "trained": later._trained, "groups": later._groups}


def take_changes(
    model: nn.Module, optimizers: Sequence[optim.Optimizer], changes: Mapping[str, Any]
) -> None:
    """Apply host 0's changes to another host's model and optimizers."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for (name, attribute), value in changes["attributes"].items():
        modules[name].__dict__[attribute] = value
    for name, is_trained in changes["trained"].items():
        parameters[name].requires_grad_(is_trained)
    for optimizer, groups in zip(optimizers, changes["groups"], strict=True):
        known = optimizer.param_groups
        if [len(group) for group in groups] != [len(group["params"]) for group in known]:
            known.clear()
            for group in groups:
                optimizer.add_param_group({"params": [parameters[name] for name in group]})


def _encoded(value: object) -> bytes | None:
    """The encoded value; None if it is no plain value."""
    try:
        return encode(value)
    except ShippingError:
        return None


def _shown(module: str, attribute: str) -> str:
    kind = {"_parameters": "the parameters", "_modules": "the modules"}.get(attribute)
    where = f"of {module!r}" if module else "of the model"
    return f"{kind or repr(attribute)} {where}"
