"""The inputs of a Plan, for a model of any library: a torch module, its precision, and samples."""

import sys
from typing import Any

from torch import nn

from lockstep.data.batch_dims import BatchDims
from lockstep.data.map_style.sources import Source, as_input_source, as_source


def plan_inputs(
    model: Any, precision: str, sample: Any, dims: BatchDims
) -> tuple[nn.Module, str, Source | None]:
    """A model as a torch module whose layers have the names that users know.

    Args:
        model: of PyTorch or Keras.
        precision: of a PyTorch model; a Keras model has its own.
        sample: data as the library's ``fit`` or ``predict`` takes it, or None.
        dims: where the samples are in it.

    Returns:
        The module, the precision, and the samples or None.

    Raises:
        ModelError: a Keras model is not built, or has a step of its own.
        OptionError: a Keras model has constants among its inputs.
    """
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):
        from lockstep.frontends.keras.fit.data_adapter import samples_in
        from lockstep.frontends.keras.fit.layout import layout_of
        from lockstep.frontends.keras.model import module_of

        layout = layout_of(dims)
        module = module_of(model, layout)
        return module, module.precision, None if sample is None else samples_in(sample, layout)
    if sample is None:
        return model, precision, None
    is_pair = isinstance(sample, tuple) and len(sample) in (2, 3)
    sample = dims.data(sample, with_targets=is_pair)
    samples = as_source(sample) if is_pair else as_input_source(sample, name="sample")
    return model, precision, samples
