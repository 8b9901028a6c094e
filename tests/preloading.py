"""torchmetrics, without what it also imports where that is installed: four fifths of its time.

Transformers, matplotlib and SciPy are for metrics and plots that no test has.
"""

from unittest.mock import patch

from lightning_utilities.core import imports

with (
    patch.object(imports.RequirementCache, "__bool__", lambda requirement: False),
    patch.object(imports, "package_available", lambda name: False),
):
    import torchmetrics  # noqa: F401
