"""What of a Keras model must be alike on all hosts, beside what must of any model."""

from typing import Any

from lockstep.frontends.keras.layers.fast_forward import is_plain_kind
from lockstep.train.resume.stable_descriptions import Facts, said


def facts_of(model: Any) -> Facts:
    """Layers, losses and metrics of a compiled model, by what they are called."""
    layers = model._flatten_layers()
    facts: Facts = {"the layers": [(_layer_path(layer), type(layer).__name__) for layer in layers]}
    for layer in filter(is_plain_kind, layers):
        for option, value in layer.get_config().items():
            if option != "trainable":  # a callback may change that, and it is told
                facts[f"`{option}` of the layer {_layer_path(layer)!r}"] = value
    if model._compile_loss is not None:
        facts["the loss of compile"] = said(model._compile_loss._user_loss)
        facts["the loss weights"] = said(model._compile_loss._user_loss_weights)
    if model._compile_metrics is not None:
        facts["the metrics of compile"] = said(model._compile_metrics._user_metrics)
    return facts


def _layer_path(layer: Any) -> str:
    """What a layer is called; one without weights has no path of its own."""
    return str(layer.path or layer.name)
