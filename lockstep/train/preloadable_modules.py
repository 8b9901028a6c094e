"""Modules that helpers need for what they are sent, and that may be imported before they are born.

A helper imports what defines the classes of what it is sent: seconds, in every helper of every
Trainer. Their template can do it once for all. It forks, though, and a user's own modules may start
threads or open files as they are imported. So it imports those of packages that are known not to.
"""

from collections.abc import Iterable

_PACKAGES = ("timm", "torchmetrics", "torchvision", "transformers")


def known_modules(objects: Iterable[object]) -> tuple[str, ...]:
    """The modules of the objects' classes that belong to well-known packages, in order."""
    modules = {type(one).__module__ for one in objects}
    return tuple(sorted(one for one in modules if one.partition(".")[0] in _PACKAGES))
