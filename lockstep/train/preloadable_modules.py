"""Modules that helpers need, and that are safe to import before helpers fork.

A helper imports the modules that define the classes of what it is sent: seconds, in every helper of
every Trainer. The template can import them once for all helpers. But it forks, and a user's own
modules may start threads or open files on import. So it imports only packages known not to.
"""

from collections.abc import Iterable

_PACKAGES = ("timm", "torchmetrics", "torchvision", "transformers")


def known_modules(objects: Iterable[object]) -> tuple[str, ...]:
    """The modules of the objects' classes that belong to well-known packages, in order."""
    modules = {type(one).__module__ for one in objects}
    return tuple(sorted(one for one in modules if one.partition(".")[0] in _PACKAGES))
