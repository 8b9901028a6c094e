"""Layers of every kind that keep a hidden tensor's shape, so that any of them may follow another.

Samples are along the first dim. Each table has what takes, and returns, tensors of one shape:

    vector    (n, WIDTH)
    sequence  (n, LENGTH, WIDTH)
    signal    (n, WIDTH, TICKS)
    image     (n, WIDTH, SIDE, SIDE)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils import parametrizations

from tests.fuzz import layers as own
from tests.fuzz.layers import SIDE, WIDTH, Apply, Residual, Transposed


def _conv1d(**options: Any) -> nn.Module:
    return nn.Conv1d(WIDTH, WIDTH, 3, **{"padding": 1, **options})


def _conv2d(**options: Any) -> nn.Module:
    return nn.Conv2d(WIDTH, WIDTH, 3, **{"padding": 1, **options})


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _lazy_linear() -> nn.Module:
    return nn.LazyLinear(WIDTH)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))


def _down_and_up() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(WIDTH, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(4, WIDTH, 4, stride=2, padding=1),
    )


def _encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True, **options)


Make = Callable[[], nn.Module]

# Batch statistics: exact under data parallelism, and in pipelines with one microbatch.
BATCH_NORMS = {"batch norm", "batch norm, plain", "batch norm, counted", "batch norm, stateless"}
# Draw random numbers: equal only where num_shares are.
RANDOM = {"dropout", "alpha dropout", "channel dropout", "noise", "rrelu"}


def _everywhere(norm: type[nn.Module]) -> dict[str, Make]:
    """Layers that take any of the shapes, with channels second."""
    return {
        "relu": nn.ReLU,
        "gelu": nn.GELU,
        "silu in place": lambda: nn.Sequential(nn.GroupNorm(3, WIDTH), nn.SiLU(inplace=True)),
        "softplus": nn.Softplus,
        "prelu": partial(nn.PReLU, WIDTH),
        "batch norm": partial(norm, WIDTH),
        "batch norm, plain": partial(norm, WIDTH, affine=False),
        "batch norm, counted": partial(norm, WIDTH, momentum=None),
        "batch norm, stateless": partial(norm, WIDTH, track_running_stats=False),
        "group norm": partial(nn.GroupNorm, 2, WIDTH),
        "scalars": own.Scalars,
        "halved gradient": partial(Apply, own.halved_gradient),
        "straight through": partial(Apply, own.straight_through),
        "in place": partial(Apply, own.in_place),
        "masked in place": partial(Apply, own.masked_in_place),
        "detached part": partial(Apply, own.detached_part),
        "sorted": partial(Apply, own.sorted_along),
        "dropout": partial(nn.Dropout, 0.3),
        "rrelu": nn.RReLU,
    }


BLOCKS: dict[str, dict[str, Make]] = {
    "vector": {
        **_everywhere(nn.BatchNorm1d),
        "linear": _linear,
        "linear without bias": partial(nn.Linear, WIDTH, WIDTH, bias=False),
        "mlp": _mlp,
        "residual": lambda: Residual(_mlp()),
        "layer norm": partial(nn.LayerNorm, WIDTH),
        "rms norm": partial(nn.RMSNorm, WIDTH),
        "bilinear": own.SelfBilinear,
        "complex": own.Complex,
        "experts": own.Experts,
        "masked experts": own.Masked,
        "counting": own.CountingCalls,
        "lazy": _lazy_linear,
        "hooked": own.hooked,
        "hooked backward": own.hooked_backward,
        "parameter hook": own.parameter_hook,
        "frozen": own.frozen,
        "frozen bias": own.frozen_bias,
        "weight norm": lambda: parametrizations.weight_norm(_linear()),
        "spectral norm": lambda: parametrizations.spectral_norm(_linear()),
        "orthogonal": lambda: parametrizations.orthogonal(_linear()),
        "checkpointed": lambda: own.Checkpointed(_mlp(), use_reentrant=False),
        "checkpointed, reentrant": lambda: own.Checkpointed(_mlp(), use_reentrant=True),
        "alpha dropout": partial(nn.AlphaDropout, 0.3),
    },
    "sequence": {
        "linear": _linear,
        "residual": lambda: Residual(_mlp()),
        "gelu": nn.GELU,
        "layer norm": partial(nn.LayerNorm, WIDTH),
        "rms norm": partial(nn.RMSNorm, WIDTH),
        "batch norm": lambda: Transposed(nn.BatchNorm1d(WIDTH)),
        "convolution": lambda: Transposed(_conv1d()),
        "lstm": lambda: own.First(nn.LSTM(WIDTH, 4, batch_first=True, bidirectional=True), 8),
        "lstm, projected": lambda: own.First(nn.LSTM(WIDTH, 7, batch_first=True, proj_size=3), 3),
        "gru": lambda: own.First(nn.GRU(WIDTH, 4, num_layers=2, batch_first=True), 4),
        "rnn": lambda: own.First(nn.RNN(WIDTH, 5, nonlinearity="relu", batch_first=True), 5),
        "time first": own.TimeFirst,
        "stateful": own.Stateful,
        "cell": own.CellLoop,
        "attention": own.SelfAttention,
        "attention, causal": partial(own.SelfAttention, causal=True),
        "attention, with keys": partial(own.SelfAttention, add_bias_kv=True, add_zero_attn=True),
        "attention, plain": partial(Apply, own.attended),
        "encoder": _encoder,
        "encoder, norm first": partial(_encoder, norm_first=True, activation="gelu"),
        "encoder without bias": partial(_encoder, bias=False),
        "decoder": own.Decoder,
        "positions": own.Positions,
        "straight through": partial(Apply, own.straight_through),
        "in place": partial(Apply, own.in_place),
        "checkpointed": lambda: own.Checkpointed(_mlp(), use_reentrant=False),
        "lazy": _lazy_linear,
        "dropout": partial(nn.Dropout, 0.3),
    },
    "signal": {
        **_everywhere(nn.BatchNorm1d),
        "convolution": _conv1d,
        "convolution, grouped": partial(_conv1d, groups=3, bias=False),
        "convolution, circular": partial(_conv1d, padding_mode="circular"),
        "convolution, dilated": partial(_conv1d, dilation=2, padding="same"),
        "transposed convolution": partial(nn.ConvTranspose1d, WIDTH, WIDTH, 3, padding=1),
        "instance norm": partial(nn.InstanceNorm1d, WIDTH, affine=True),
        "max pool": partial(nn.MaxPool1d, 3, 1, 1),
        "average pool": partial(nn.AvgPool1d, 3, 1, 1),
        "power pool": lambda: nn.Sequential(nn.ReflectionPad1d(1), nn.LPPool1d(2, 3, 1)),
        "channel dropout": partial(nn.Dropout1d, 0.3),
    },
    "image": {
        **_everywhere(nn.BatchNorm2d),
        "convolution": _conv2d,
        "convolution, pointwise": partial(nn.Conv2d, WIDTH, WIDTH, 1),
        "convolution, depthwise": partial(_conv2d, groups=WIDTH),
        "convolution, reflected": partial(_conv2d, padding_mode="reflect", bias=False),
        "convolution, weight norm": lambda: parametrizations.weight_norm(_conv2d()),
        "convolution, lazy": partial(nn.LazyConv2d, WIDTH, 3, padding=1),
        "down and up": _down_and_up,
        "instance norm": partial(nn.InstanceNorm2d, WIDTH),
        "local response": partial(nn.LocalResponseNorm, 3),
        "max pool": partial(nn.MaxPool2d, 3, 1, 1),
        "average pool": partial(nn.AvgPool2d, 3, 1, 1),
        "adaptive pool": partial(nn.AdaptiveAvgPool2d, SIDE),
        "shuffled": partial(Apply, own.channel_shuffle),
        "up and down": partial(Apply, own.up_and_down),
        "pixel shuffle": partial(Apply, own.pixel_shuffled),
        "folded": partial(Apply, own.folded),
        "residual": lambda: Residual(_conv2d()),
        "channel dropout": partial(nn.Dropout2d, 0.3),
    },
}
