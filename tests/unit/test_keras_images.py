"""Keras's layers of images without copies: the same bits, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from keras import layers

import lockstep  # noqa: F401  # before Keras: it chooses Keras's PyTorch backend
from lockstep.frontends.keras.fit.images import channels_last_in_memory

LAYERS: dict[str, Callable[[], Any]] = {
    "convolution": lambda: layers.Conv2D(6, 3),
    "padded": lambda: layers.Conv2D(6, (3, 2), padding="same", activation="relu"),
    "strided": lambda: layers.Conv2D(6, 3, strides=2, padding="same", use_bias=False),
    "dilated": lambda: layers.Conv2D(6, 2, dilation_rate=2, padding="same"),
    "in groups": lambda: layers.Conv2D(6, 3, groups=2),
    "of single pixels": lambda: layers.Conv2D(6, 1),
    "channels first": lambda: layers.Conv2D(6, (3, 1), data_format="channels_first"),
    "depthwise": lambda: layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"),
    "separable": lambda: layers.SeparableConv2D(6, 3),
    "transposed": lambda: layers.Conv2DTranspose(6, 3, strides=2, padding="same"),
    "largest": lambda: layers.MaxPooling2D(2),
    "largest, padded": lambda: layers.MaxPooling2D(3, strides=2, padding="same"),
    "mean": lambda: layers.AveragePooling2D(2),
    "mean, padded": lambda: layers.AveragePooling2D((3, 2), strides=1, padding="same"),
    "largest of all": lambda: layers.GlobalMaxPooling2D(),
    "mean of all": lambda: layers.GlobalAveragePooling2D(keepdims=True),
    "mean to a size": lambda: layers.AdaptiveAveragePooling2D((2, 3)),
    "largest to a size": lambda: layers.AdaptiveMaxPooling2D(2),
    "larger": lambda: layers.UpSampling2D(2, interpolation="bilinear"),
    "normalized": lambda: layers.BatchNormalization(),
    "of a volume": lambda: layers.Conv3D(4, 2, padding="same"),
    "of a volume, transposed": lambda: layers.Conv3DTranspose(4, 2, strides=2),
    "largest of a volume": lambda: layers.MaxPooling3D(2, padding="same"),
    "mean of a volume": lambda: layers.AveragePooling3D(2),
    "of a sequence": lambda: layers.Conv1D(4, 3, padding="causal"),
    "largest of a sequence": lambda: layers.MaxPooling1D(2),
}
SHAPES = {"of a volume": (2, 4, 5, 6, 3), "of a sequence": (2, 9, 3)}


def images(name: str, channels: int, *, permuted: bool) -> torch.Tensor:
    shape = next((one for part, one in SHAPES.items() if part in name), (2, 7, 6, 3))
    x = torch.randn(*shape[:-1], channels, generator=torch.Generator().manual_seed(0))
    if permuted:  # as channels first in memory
        x = x.movedim(-1, 1).contiguous().movedim(1, -1)
    return x.requires_grad_()


def pass_through(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, and gradients of the inputs and all weights."""
    out = layer(x, training=True) if layer._call_has_training_arg else layer(x)
    ramp = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    weights = [variable.value for variable in layer.trainable_variables]
    return [out, *torch.autograd.grad(out, [x, *weights], ramp)]


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("channels", [4, 1])
@pytest.mark.parametrize("name", LAYERS)
def test_bits_are_those_of_keras(name: str, channels: int, permuted: bool) -> None:
    if name == "in groups" and channels == 1:
        channels = 2
    x = images(name, channels, permuted=permuted)
    layer = LAYERS[name]()
    layer.build(x.shape)
    wanted = pass_through(layer, x)
    with channels_last_in_memory():
        found = pass_through(layer, x)
    for ours, theirs in zip(found, wanted, strict=True):
        if "transposed" in name:  # its kernels for the two forms differ on processors without AVX2
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(ours, theirs)


def test_nothing_is_copied() -> None:
    x = torch.randn(2, 6, 6, 4)
    with channels_last_in_memory():
        out = layers.MaxPooling2D(2)(layers.Conv2D(8, 3, padding="same")(x))
    assert out.is_contiguous()
    assert not layers.MaxPooling2D(2)(x).is_contiguous()
