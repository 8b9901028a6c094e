"""Processors without AVX-512: some convolutions break there, and LSTMs in bfloat16 are lacking."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.parallel.storage import cpu_quirks
from lockstep.parallel.storage.cpu_quirks import breaks_channels_last
from tests.faults.processes import run

# Without the remedy it ends in "corrupted double-linked list" or a segmentation fault.
SCRIPT = """
import lockstep, torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 1, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(96, 2),
    )
    images, labels = torch.randn(88, 3, 10, 10), torch.randint(0, 2, (88,))
    for strategy in (lockstep.MirroredStrategy(2), lockstep.PipelineStrategy(2)):
        trainer = lockstep.Trainer(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            strategy=strategy,
        )
        trainer.fit((images, labels), epochs=4, batch_size=22, verbose=0)
        print(torch.backends.cpu.get_cpu_capability(), trainer.plan.channels_last)

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.memory = nn.Linear(8, 8), nn.LSTM(8, 16, batch_first=True)
            self.head = nn.Linear(16, 2)
        def forward(self, x):
            return self.head(self.memory(self.words(x))[0][:, -1])

    words, kinds = torch.randn(44, 5, 8), torch.randint(0, 2, (44,))
    for strategy in (lockstep.MirroredStrategy(2), lockstep.PipelineStrategy(2)):
        losses = []
        for precision in ("fp32", "bf16-mixed", "fp16-mixed"):
            torch.manual_seed(1)
            trainer = lockstep.Trainer(Words(), loss=nn.CrossEntropyLoss(), strategy=strategy,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.01), precision=precision)
            history = trainer.fit((words, kinds), epochs=2, batch_size=22, verbose=0)
            assert trainer.predict(words).isfinite().all()
            losses.append(history.history["loss"][-1])
        print(max(losses) - min(losses) < 0.01)
"""


@pytest.mark.thorough
def test_convolutions_and_lstms_train_without_avx512(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    # A mirrored Plan says what is wanted; each host sees whether its processor can do it.
    formats = ["AVX2 True", "AVX2 False"]
    assert run(SCRIPT, directory=tmp_path).splitlines() == [*formats, "True", "True"]


@pytest.mark.parametrize("lacks", [True, False])
def test_other_convolutions_keep_the_format(lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_quirks, "_lacks_avx512", lambda: lacks)
    assert not breaks_channels_last(nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 1)))
    assert not breaks_channels_last(nn.Conv2d(8, 6, 1, 2))
    assert breaks_channels_last(nn.Conv2d(8, 6, 1, 2, groups=2)) == lacks
    assert breaks_channels_last(nn.Sequential(nn.ReLU(), nn.Conv2d(4, 6, 1, 2))) == lacks
    assert breaks_channels_last(nn.Conv2d(4, 6, 1, (1, 2))) == lacks


def test_this_processor_is_looked_at() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    assert cpu_quirks._lacks_avx512() == (capability in ("DEFAULT", "AVX2"))
