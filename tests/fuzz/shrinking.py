"""Makes a case as small as it can be while the same becomes of it."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tests.fuzz.running import Outcome

KEPT = ("strategy", "seed")


def shrunk(outcome: Outcome, run: Callable[[Any], Outcome]) -> Outcome:
    """The outcome of the smallest case that was found."""
    for case in smaller(outcome.case):
        tried = run(case)
        if tried.kind == outcome.kind:
            return shrunk(tried, run)
    return outcome


def smaller(case: Any) -> Iterator[Any]:
    """Cases with one thing less: as it is by default, or without one of several."""
    plain = type(case)()
    for name in (one.name for one in fields(case) if one.name not in KEPT):
        own, default = getattr(case, name), getattr(plain, name)
        if own != default:
            for less in (default, *_less(own)):
                yield replace(case, **{name: less})


def _less(value: Any) -> Iterator[Any]:
    if is_dataclass(value):
        yield from smaller(value)
    elif isinstance(value, dict):
        yield from ({k: one for k, one in value.items() if k != key} for key in value)
    elif isinstance(value, tuple) and len(value) > 1:
        yield from (value[:place] + value[place + 1 :] for place in range(len(value)))
