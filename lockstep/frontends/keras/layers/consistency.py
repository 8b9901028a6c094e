"""Facts of a Keras model that must be equal on all hosts, beside those of any model."""

from typing import Any

from lockstep.frontends.keras.layers.fast_forward import is_plain_kind
from lockstep.train.resume.stable_descriptions import Facts, said


def facts_of(model: Any) -> Facts:
    """Layers, losses and metrics of a compiled model, by name."""
    layers = model._flatten_layers()
    facts: Facts = {"the layers": [(_layer_path(layer), type(layer).__name__) for layer in layers]}
    for layer in filter(is_plain_kind, layers):
        for option, value in layer.get_config().items():
            if option != "trainable":  # a callback may change it, and all hosts get the change
                facts[f"`{option}` of the layer {_layer_path(layer)!r}"] = value
    if model._compile_loss is not None:
        facts["the loss of compile"] = said(model._compile_loss._user_loss)
        facts["the loss weights"] = said(model._compile_loss._user_loss_weights)
    if model._compile_metrics is not None:
        facts["the metrics of compile"] = said(model._compile_metrics._user_metrics)
    return facts


def _layer_path(layer: Any) -> str:
    """A layer's path; its name if it has no weights, and so no path."""
    return str(layer.path or layer.name)
