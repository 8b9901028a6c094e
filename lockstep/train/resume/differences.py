"""What differs between the ``fit`` that a checkpoint is of and the one that goes on from it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lockstep.errors import CheckpointError

OnDifference = Literal["error", "take new", "keep"]
ON_DIFFERENCE = get_args(OnDifference)

# On these the order of an epoch's samples depends.
_OF_ORDER = ("batch_size", "steps_per_epoch", "shuffle", "seed", "data", "initial_epoch")


@dataclass(frozen=True)
class Difference:
    """A fact that is not what it was.

    Attributes:
        name: of the fact.
        then: what the checkpoint says.
        now: what the script says.
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
        """The option of an optimizer; the whole name of what is none."""
        is_option = self.name.startswith("optimizer")
        return self.name.rpartition(".")[2] if is_option else self.name

    @property
    def is_of_schedule(self) -> bool:
        """Whether it decides what rates come next."""
        return self.name.partition(".")[0] in ("schedule", "learning_rate")

    @property
    def is_held(self) -> bool:
        """Whether the checkpoint has the value itself, to go on with it."""
        is_told = self.name.startswith(("optimizer", "schedule"))
        is_described = self.name.endswith((".code", ".values", ".tensors")) or "lambda" in self.name
        return is_told and not self.is_fixed and not is_described and self.name != "schedule"

    @property
    def is_fixed(self) -> bool:
        """Whether the checkpoint's slots are of no use with the new value."""
        return self.name in ("optimizer", "learning_rate") or (
            self.name.startswith("optimizer") and self.name.endswith(".params")
        )


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """All that differs, but for how many epochs there are.

    What a checkpoint of an older version does not tell is not compared.
    """
    found = [
        Difference(name, value, now.get(name))
        for name, value in then.items()
        if name != "epochs" and not _is_same(name, value, now.get(name), then, now)
    ]
    names = {one.name for one in found}
    return [one for one in found if one.name in now or not _is_part(one, names)]


def _is_part(one: Difference, names: Collection[str]) -> bool:
    """Whether a fact is one of something that is another thing now."""
    is_of_schedule = "schedule" in names and one.option == "initial_lr"
    return is_of_schedule or one.name.partition(".")[0] in names


def told(found: Sequence[Difference]) -> str:
    """Differences in words."""
    names = {one.name for one in found}
    # A schedule begins with ``initial_lr``, and makes ``lr`` of it.
    return "; ".join(
        str(one) for one in found if f"{one.name.removesuffix('.lr')}.initial_lr" not in names
    )


def settle(
    found: Sequence[Difference],
    on_difference: OnDifference,
    *,
    place: str,
    epochs: tuple[int, int],
    in_epoch: bool,
) -> list[Difference]:
    """The differences of which the new value is to be taken.

    Args:
        found: all.
        on_difference: what the user wants.
        place: of the checkpoint.
        epochs: that were asked for, then and now.
        in_epoch: an epoch has begun.

    Raises:
        CheckpointError: training cannot go on so.
    """
    if not found:
        return []
    if on_difference == "error":
        raise CheckpointError(
            f"The script has changed since {place} was written{_of_epochs(found, epochs)}.",
            received=told(found),
            fix="Change it back, or pass on_difference to the Checkpoint: "
            '"take new" goes on with what the script says now, "keep" with the optimizer\'s '
            "options and the schedule that the checkpoint has. Or give another folder to begin "
            "anew.",
        )
    if fixed := [one for one in found if one.is_fixed]:
        raise CheckpointError(
            f"Another optimizer cannot go on with the slots of the one in {place}.",
            received=told(fixed),
            fix="Change it back, or begin anew in another folder, from the weights that "
            "lockstep.checkpoint.load_state_dict(folder) reads.",
        )
    if on_difference == "keep":
        if strange := [one for one in found if not one.is_held]:
            raise CheckpointError(
                'on_difference="keep" can keep what is in a checkpoint: the optimizer\'s options '
                "and the schedule.",
                received=told(strange),
                fix='Change it back, or pass on_difference="take new".',
            )
        return []
    if in_epoch and (order := [one for one in found if one.name in _OF_ORDER]):
        raise CheckpointError(
            f"{place} was written within an epoch, whose order of samples depends on what has "
            "changed.",
            received=told(order),
            fix='Change it back until the epoch has ended. Checkpoint(every="epoch") writes '
            "checkpoints between epochs, from which training can go on in another order.",
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
