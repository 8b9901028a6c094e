"""The differences between the ``fit`` of a checkpoint and the one that resumes from it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lockstep.errors import CheckpointError

OnDifference = Literal["error", "take new", "keep"]
ON_DIFFERENCE = get_args(OnDifference)

# The order of an epoch's samples depends on these.
_OF_ORDER = ("batch_size", "steps_per_epoch", "shuffle", "seed", "data", "initial_epoch")


@dataclass(frozen=True)
class Difference:
    """A fact that differs.

    Attributes:
        name: of the fact.
        then: its value in the checkpoint.
        now: its value in the script.
    """

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        name = self.name.replace(".initial_lr", ".lr")
        if name.endswith(".code"):
            return f"{name.removesuffix('.code')}: its code has changed"
        return f"{name}: {_shown(self.then)} in the checkpoint, {_shown(self.now)} now"

    @property
    def option(self) -> str:
        """The option's name if it is one of an optimizer, else the fact's name."""
        is_option = self.name.startswith("optimizer")
        return self.name.rpartition(".")[2] if is_option else self.name

    @property
    def is_of_schedule(self) -> bool:
        """True if it affects the rates to come."""
        return self.name.partition(".")[0] in ("schedule", "learning_rate")

    @property
    def is_restorable(self) -> bool:
        """True if the checkpoint has the value itself, so that a run can keep it."""
        is_saved = self.name.startswith(("optimizer", "schedule"))
        is_described = self.name.endswith((".code", ".values", ".tensors")) or "lambda" in self.name
        return is_saved and not self.is_fixed and not is_described and self.name != "schedule"

    @property
    def is_fixed(self) -> bool:
        """True if the checkpoint's slots cannot be used with the new value."""
        return self.name in ("optimizer", "learning_rate") or (
            self.name.startswith("optimizer") and self.name.endswith(".params")
        )


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """All that differs, except the number of epochs.

    Facts that a checkpoint of an older version does not have are not compared.
    """
    found = [
        Difference(name, value, now.get(name))
        for name, value in then.items()
        if name != "epochs" and not _is_same(name, value, now.get(name), then, now)
    ]
    names = {one.name for one in found}
    return [one for one in found if one.name in now or not _is_part(one, names)]


def _is_part(one: Difference, names: Collection[str]) -> bool:
    """True if a fact is a detail of an object that differs as a whole."""
    is_of_schedule = "schedule" in names and one.option == "initial_lr"
    return is_of_schedule or one.name.partition(".")[0] in names


def describe(found: Sequence[Difference]) -> str:
    """The differences, for a message."""
    names = {one.name for one in found}
    # A schedule computes ``lr`` from ``initial_lr``.
    return "; ".join(
        str(one) for one in found if f"{one.name.removesuffix('.lr')}.initial_lr" not in names
    )


def resolve(
    found: Sequence[Difference],
    on_difference: OnDifference,
    *,
    place: str,
    epochs: tuple[int, int],
    in_epoch: bool,
) -> list[Difference]:
    """The differences for which the script's value is used.

    Args:
        found: all.
        on_difference: the user's choice.
        place: of the checkpoint.
        epochs: in the checkpoint and in the script.
        in_epoch: an epoch has begun.

    Raises:
        CheckpointError: training cannot resume with these differences.
    """
    if not found:
        return []
    if on_difference == "error":
        raise CheckpointError(
            f"The script has changed since {place} was written{_of_epochs(found, epochs)}.",
            received=describe(found),
            fix="Change it back, or pass on_difference to the Checkpoint: "
            '"take new" resumes with the values of the script, "keep" with the optimizer\'s '
            "options and the schedule of the checkpoint. Or give another folder to begin anew.",
        )
    if fixed := [one for one in found if one.is_fixed]:
        raise CheckpointError(
            f"Another optimizer cannot use the slots of the one in {place}.",
            received=describe(fixed),
            fix="Change it back, or begin anew in another folder, from the weights that "
            "lockstep.checkpoint.load_state_dict(folder) reads.",
        )
    if on_difference == "keep":
        if strange := [one for one in found if not one.is_restorable]:
            raise CheckpointError(
                'on_difference="keep" can keep only the optimizer\'s options and the schedule.',
                received=describe(strange),
                fix='Change it back, or pass on_difference="take new".',
            )
        return []
    if in_epoch and (order := [one for one in found if one.name in _OF_ORDER]):
        raise CheckpointError(
            f"{place} was written within an epoch, and the change gives the epoch another order "
            "of samples.",
            received=describe(order),
            fix='Change it back until the epoch has ended. Checkpoint(every="epoch") writes '
            "checkpoints between epochs, from which training can resume in another order.",
        )
    return list(found)


def _of_epochs(found: Sequence[Difference], epochs: tuple[int, int]) -> str:
    of_schedule = {one.name for one in found if one.is_of_schedule}
    if epochs[0] == epochs[1] or not of_schedule or "schedule" in of_schedule:
        return ""
    return f", from epochs={epochs[0]} to epochs={epochs[1]}, on which its schedule depends"


def _is_same(
    name: str, value: Any, other: Any, then: Mapping[str, Any], now: Mapping[str, Any]
) -> bool:
    if name.endswith(".code") and isinstance(value, str) and isinstance(other, str):
        python, _, code = value.partition(": ")
        return other.partition(": ")[0] != python or other.partition(": ")[2] == code
    if name == "evaluates":  # epochs, of which there may be more or fewer
        common = range(min(then["epochs"], now["epochs"]))
        return [one for one in value if one in common] == [one for one in other if one in common]
    return bool(value == other)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and " " in value else repr(value)
