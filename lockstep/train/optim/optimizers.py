"""Several optimizers of one model, by name, in the order in which they step."""

from collections.abc import Mapping
from typing import Any

from torch import nn, optim

from lockstep.errors import OptionError, Problems
from lockstep.train.optim.optimizer_checks import make_optimizer


class Optimizers(dict[str, optim.Optimizer]):
    """torch optimizers by name."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all of them."""
        return [group for optimizer in self.values() for group in optimizer.param_groups]


def make_optimizers(
    optimizer: Any, model: nn.Module, train_step: object
) -> optim.Optimizer | Optimizers | None:
    """The optimizer, or optimizers, of the Trainer's ``optimizer`` argument.

    Of several, one given as a class or function gets the parameters of the submodule of its name.

    Args:
        optimizer: see ``make_optimizer``; or a dict of these, a name for each function of
            ``train_step``.
        model: whose parameters they step on.
        train_step: the user's.

    Raises:
        OptionError: the names differ, or a parameter has two optimizers.
    """
    if not isinstance(optimizer, Mapping) and not isinstance(train_step, Mapping):
        return None if optimizer is None else make_optimizer(optimizer, model)
    _check_names(optimizer, train_step)
    made = Optimizers(
        {name: _make_one(name, optimizer[name], model) for name in train_step}  # type: ignore[attr-defined]
    )
    _check_disjoint(made, model)
    return made


def each_optimizer(optimizer: optim.Optimizer | Optimizers | None) -> list[optim.Optimizer]:
    """The optimizers as a list: none, one or several."""
    if optimizer is None:
        return []
    return list(optimizer.values()) if isinstance(optimizer, Optimizers) else [optimizer]


def rates_of(optimizer: optim.Optimizer | Optimizers | None) -> list[float]:
    """The learning rates at present, each once."""
    groups = [group for one in each_optimizer(optimizer) for group in one.param_groups]
    return list(dict.fromkeys(float(group["lr"]) for group in groups if "lr" in group))


def names_of(optimizer: optim.Optimizer, model: nn.Module) -> frozenset[str]:
    """The names of the parameters that an optimizer has."""
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return frozenset(name for name, one in model.named_parameters() if id(one) in own)


def _make_one(name: str, optimizer: Any, model: nn.Module) -> optim.Optimizer:
    if isinstance(optimizer, optim.Optimizer):
        return make_optimizer(optimizer, model)
    part = dict(model.named_modules()).get(name)
    if part is None:
        raise OptionError(
            "With several optimizers, a class or function gets the parameters of the submodule "
            "of its name.",
            received=f"optimizer {name!r}, and no submodule {name!r}",
            fix="Pass an optimizer over the parameters, or name it after a submodule.",
        )
    made = make_optimizer(optimizer, part)
    return make_optimizer(made, model)


def _check_names(optimizer: object, train_step: object) -> None:
    problems = Problems()
    for name, value in (("optimizer", optimizer), ("train_step", train_step)):
        if not isinstance(value, Mapping) or not value:
            problems.add(
                "Several optimizers need as many functions in train_step, by name.",
                received=f"{name}={value!r}" if value is None else f"{name} is not such a dict",
                fix='Pass optimizer={"a": ..., "b": ...} and train_step={"a": ..., "b": ...}.',
            )
    problems.raise_if_any(OptionError)
    assert isinstance(optimizer, Mapping)
    assert isinstance(train_step, Mapping)
    if set(optimizer) != set(train_step):
        raise OptionError(
            "Optimizers and functions of train_step must have the same names.",
            received=f"optimizers {sorted(optimizer)}, functions {sorted(train_step)}",
            fix="Give one optimizer for each function.",
        )


def _check_disjoint(made: Optimizers, model: nn.Module) -> None:
    owners: dict[str, list[str]] = {}
    for name, optimizer in made.items():
        for parameter in names_of(optimizer, model):
            owners.setdefault(parameter, []).append(name)
    shared = {name: names for name, names in owners.items() if len(names) > 1}
    if shared:
        parameter, names = next(iter(sorted(shared.items())))
        raise OptionError(
            "Every parameter must have one optimizer only.",
            received=f"{parameter!r} has {' and '.join(names)}",
            fix="Divide the parameters among the optimizers.",
        )
