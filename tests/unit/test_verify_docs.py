"""The examples of docs/exactness.md run, in their order."""

import re
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.proof.batch_loss import batch_loss

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"


def test_examples_run() -> None:
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        for example in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
            exec(example, names)
    assert names["report"].passed
    strategy = lockstep.MirroredStrategy(devices=1, num_shares=3)
    job = names["make_job"]()
    targets = torch.nn.functional.one_hot(job.data[1], 3).float()
    absolute = lockstep.Job(job.model, names["loss"], job.optimizer, (job.data[0], targets), 7)
    assert lockstep.verify(absolute, strategy).passed
    logits, tokens = torch.randn(2, 4, 5), torch.tensor([[1, -100, 2, 0], [-100, -100, 4, 1]])
    mean = batch_loss(names["token_loss"], logits, tokens, None)
    assert mean is not None
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(mean, expected)
