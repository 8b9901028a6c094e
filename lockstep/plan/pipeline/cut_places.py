"""Where users say that stages begin: by names of modules, or by device scopes.

Both give a cutting, the tuple ``starts`` of the first layers of the stages, as
``plan.pipeline.cuts`` does. All problems are gathered and reported at once.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from lockstep.errors import OptionError, Problems
from lockstep.formatting import first_few, listed


def stages_from_names(
    names: Sequence[str], cuts: Sequence[str], undivided: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, ...]:
    """The cutting whose stages, but for the first, begin at the named modules.

    Args:
        names: dotted module path of each layer in the order in which the model computes; a
            module's second call has the suffix ``@2``.
        cuts: modules, or containers of modules, whose first layer begins a stage.
        undivided: layers that run as one piece although they are made of others, with the reason.

    Raises:
        OptionError: unknown names, a cut before the first layer, two cuts at one layer, or cuts in
            another order than the model computes; all of them at once.
    """
    problems = Problems()
    starts: dict[int, str] = {}
    for cut in cuts:
        start = _first_layer(names, cut)
        if start is None:
            _add_unknown(problems, names, cut, undivided)
        elif start == 0:
            problems.add(
                f"The first stage begins at the first layer, {names[0]!r}, without a cut.",
                received=repr(cut),
                fix="Leave this cut out.",
            )
        elif start in starts:
            problems.add(
                f"Two cuts are at one layer, {names[start]!r}.",
                received=f"{starts[start]!r} and {cut!r}",
                fix="Leave one of them out.",
            )
        else:
            starts[start] = cut
    if list(starts) != sorted(starts):
        problems.add(
            "Cuts must be in the order in which the model computes.",
            received=listed(starts.values()),
            fix=f"Use {listed(starts[start] for start in sorted(starts))}.",
        )
    problems.raise_if_any(OptionError)
    return (0, *starts)


def stages_from_scopes(
    names: Sequence[str],
    devices: Sequence[int | None],
    owns_parameters: Sequence[bool],
    undivided: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, ...]:
    """The cutting that device scopes ask for: one stage per device.

    A layer that owns no parameters and lies outside of every scope goes with the layer before it;
    at the beginning of the model, with device 0.

    Args:
        names: of the layers, in the order in which the model computes.
        devices: index of each layer's device; None is outside of every scope.
        owns_parameters: whether each layer owns parameters.
        undivided: see ``stages_from_names``.

    Raises:
        OptionError: layers with parameters outside of scopes, devices that go backwards, or whose
            numbers are not 0, 1, 2 and so on; all of them at once.
    """
    problems = Problems()
    layers = list(zip(names, devices, owns_parameters, strict=True))
    outside = [name for name, at, owns in layers if owns and at is None]
    _check_all_scoped(problems, outside, undivided)
    scoped = [(name, at) for name, at, _ in layers if at is not None]
    _check_forwards(problems, scoped)
    used = sorted({at for _, at in scoped})
    _check_numbers(problems, used)
    problems.raise_if_any(OptionError)
    return (0, *(devices.index(device) for device in used[1:]))


def _check_all_scoped(
    problems: Problems, outside: Sequence[str], undivided: Mapping[str, str]
) -> None:
    whole = [name for name in outside if name in undivided]
    for name in whole:
        problems.add(
            f"The scopes within {named(name)} cannot begin stages: "
            f"{runs_whole(name, undivided[name])}.",
            received=f"{named(name)} outside of every device scope",
            fix=_how_to_divide(name, undivided[name]),
        )
    outside = [name for name in outside if name not in whole]
    if outside:
        problems.add(
            "Layers with parameters are outside of every device scope.",
            received=first_few(list(map(repr, outside))),
            fix="Build them, too, within `with lockstep.device(...):`.",
        )


def _check_forwards(problems: Problems, scoped: Sequence[tuple[str, int]]) -> None:
    back = [(earlier, later) for earlier, later in pairwise(scoped) if later[1] < earlier[1]]
    if back:
        (before, high), (after, low) = back[0]
        problems.add(
            "Device numbers must not decrease in the order in which the model computes.",
            received=first_few(
                [f"{b!r} on device {lo} after {a!r} on device {hi}" for (a, hi), (b, lo) in back]
            ),
            fix=f"Build {after!r} on device {high} or a later one, "
            f"or {before!r} on device {low} or an earlier one.",
        )


def _check_numbers(problems: Problems, used: Sequence[int]) -> None:
    if list(used) != list(range(max(len(used), 1))):
        problems.add(
            "Devices of scopes are numbered 0, 1, 2 and so on, without gaps.",
            received=f"devices {first_few(used)}" if used else "no layer in a scope",
            fix=f"Number them 0 to {len(used) - 1}."
            if len(used) > 1
            else "Use `with lockstep.device(0):` for the first stage.",
        )


def _module_path(name: str) -> str:
    """A layer's module: its name without the number of the call."""
    return re.sub(r"@\d+$", "", name)


def _first_layer(names: Sequence[str], cut: str) -> int | None:
    """The first layer that is, or lies in, the module ``cut``; one call can be named as well."""
    for index, name in enumerate(names):
        path = _module_path(name)
        if cut in (name, path) or path.startswith(cut + "."):
            return index
    return None


def named(layer: str) -> str:
    """A layer as errors name it."""
    return repr(layer) if layer else "the model"


def runs_whole(layer: str, reason: str) -> str:
    """Why no stage can begin within a layer."""
    return f"{named(layer)} runs as one piece ({reason})"


def _how_to_divide(layer: str, reason: str) -> str:
    looks_at_values = "value" in reason or "the data" in reason
    change = "Decide by torch.where instead" if looks_at_values else "Change that"
    return f"{change}{layer and ', cut elsewhere'}, or use a data parallel strategy."


def _add_unknown(
    problems: Problems, names: Sequence[str], cut: str, undivided: Mapping[str, str]
) -> None:
    for name, reason in undivided.items():
        path = _module_path(name)
        if not path or cut.startswith(f"{path}."):
            problems.add(
                f"No stage can begin at {cut!r}: {runs_whole(path, reason)}.",
                received=repr(cut),
                fix=_how_to_divide(path, reason),
            )
            return
    paths = [_module_path(name).split(".") for name in names]
    known = {".".join(path[:depth]): None for path in paths for depth in range(1, len(path) + 1)}
    near = difflib.get_close_matches(cut, known)
    problems.add(
        "A cut names a module in which layers compute.",
        received=repr(cut),
        fix=f"Did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"There are {first_few(list(map(repr, known)))}.",
    )
