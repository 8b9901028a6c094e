"""torchmetrics, without what it also imports where that is installed: two thirds of its time.

Transformers, matplotlib and SciPy are for metrics and plots that no test has.
"""

from unittest.mock import patch

from lightning_utilities.core.imports import RequirementCache

with patch.object(RequirementCache, "__bool__", lambda requirement: False):
    import torchmetrics  # noqa: F401
