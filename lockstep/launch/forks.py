"""Sockets and processes that a fork of the script gives up, because they are the script's."""

import os
import weakref
from collections.abc import MutableMapping
from typing import Any

_living: MutableMapping[Any, str] = weakref.WeakKeyDictionary()


def give_up_in_forks(owner: Any, method: str) -> None:
    """Call a method of an object, while it exists, in every fork of this process."""
    _living[owner] = method


def _give_up_all() -> None:
    for owner, method in list(_living.items()):
        getattr(owner, method)()
    _living.clear()


os.register_at_fork(after_in_child=_give_up_all)
