"""The nets of the planner's benchmarks: those of ``nets``, a U-Net and an LSTM."""

from collections.abc import Callable

import torch
from nets import NETS, Net
from torch import Tensor, nn


class SmallUNet(nn.Module):
    """Two levels down and up, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(1, 16), block(16, 32)])
        self.middle = block(32, 64)
        self.up = nn.ModuleList([block(96, 32), block(48, 16)])
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = layer(torch.cat([x, kept.pop()], 1))
        out: Tensor = self.head(x)
        return out


def block(ins: int, outs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(ins, outs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outs, outs, 3, padding=1),
        nn.ReLU(),
    )


class Reader(nn.Module):
    """An LSTM of two layers over 64 steps, and a class for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(64, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x)[0][:, -1])
        return out


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def pictures(count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 1, 32, 32)
    return inputs, inputs.tanh()


def readings(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 64, 64), torch.randint(10, (count,))


OTHERS = {
    "unet": Net("U-Net, 32 x 32", 32, 256, lambda: seeded(SmallUNet), pictures, nn.MSELoss()),
    "lstm": Net(
        "LSTM 2 x 256, 64 steps",
        64,
        256,
        lambda: seeded(Reader),
        readings,
        nn.functional.cross_entropy,
    ),
}
ALL = {**NETS, **OTHERS}
