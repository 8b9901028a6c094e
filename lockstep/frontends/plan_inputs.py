"""The inputs of a Plan, for a model of any library: a torch module, its precision, and samples."""

import sys
from typing import Any, NamedTuple

from torch import nn

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.map_style.sources import Source, as_input_source, as_source


class PlanInputs(NamedTuple):
    """The inputs of a Plan.

    Attributes:
        module: the model; its layers have the names that users know.
        precision: of its computation.
        samples: samples first; or None.
        dims: where the module takes them: a Keras model's module moves them itself.
    """

    module: nn.Module
    precision: str
    samples: Source | None
    dims: BatchDims


def plan_inputs(model: Any, precision: str, sample: Any, dims: BatchDims) -> PlanInputs:
    """A model as a torch module whose layers have the names that users know.

    Args:
        model: of PyTorch or Keras.
        precision: of a PyTorch model; a Keras model has its own.
        sample: data as the library's ``fit`` or ``predict`` takes it, or None.
        dims: where the samples are in it.

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
        samples = None if sample is None else samples_in(sample, layout)
        return PlanInputs(module, module.precision, samples, SAMPLES_FIRST)
    if sample is None:
        return PlanInputs(model, precision, None, dims)
    is_pair = isinstance(sample, tuple) and len(sample) in (2, 3)
    sample = dims.data(sample, with_targets=is_pair)
    samples = as_source(sample) if is_pair else as_input_source(sample, name="sample")
    return PlanInputs(model, precision, samples, dims)
