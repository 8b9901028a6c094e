"""Keras's process-wide settings that change what is computed: the same on every rank."""

from dataclasses import dataclass

import keras
from keras.src.backend.common import dtypes
from keras.src.backend.torch import core
from keras.src.utils import rng_utils


@dataclass(frozen=True, kw_only=True)
class KerasSettings:
    """Settings that a script may have changed before ``fit``.

    Attributes:
        floatx: the default float type, by name.
        epsilon: the fuzz factor.
        image_data_format: the order of dims of images.
        policy: the default dtype policy of layers, by name.
        flash_attention: True if flash attention may be used.
        double: the dtype that Keras uses for float64 values; float32, except in proofs.
        device: where Keras makes tensors, and moves those that it is given.
    """

    floatx: str
    epsilon: float
    image_data_format: str
    policy: str
    flash_attention: bool
    double: str
    device: str

    @classmethod
    def current(cls) -> "KerasSettings":
        """Those of this process."""
        return cls(
            floatx=keras.config.floatx(),
            epsilon=keras.config.epsilon(),
            image_data_format=keras.config.image_data_format(),
            policy=keras.config.dtype_policy().name,
            flash_attention=keras.config.is_flash_attention_enabled() is not False,
            double=dtypes.BIT64_TO_BIT32_DTYPE["float64"],
            device=core.DEFAULT_DEVICE,
        )

    def apply(self) -> None:
        """Set them in this process, permanently."""
        keras.config.set_floatx(self.floatx)
        keras.config.set_epsilon(self.epsilon)
        keras.config.set_image_data_format(self.image_data_format)
        keras.config.set_dtype_policy(self.policy)
        if self.flash_attention:
            keras.config.enable_flash_attention()
        else:
            keras.config.disable_flash_attention()
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = self.double
        core.DEFAULT_DEVICE = self.device


_OWN_DEVICE = core.DEFAULT_DEVICE


def compute_on(kind: str) -> None:
    """Have Keras make tensors on devices of a kind; by itself it looks for a few kinds only."""
    core.DEFAULT_DEVICE = _OWN_DEVICE if kind in ("cpu", "meta") else kind


def random_seed() -> int:
    """The argument of ``keras.utils.set_random_seed``; 0 without a call."""
    return rng_utils.get_random_seed() or 0
