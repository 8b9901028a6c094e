"""Shares of one rank in threads of their own: on the rank's device, one at a time."""

import threading

import pytest
import torch

from lockstep import accelerators
from lockstep.parallel.data_parallel.interleave import Interleaver


def test_each_thread_works_on_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several: a new thread works on the first until it is told otherwise."""
    chosen = threading.local()
    monkeypatch.setattr(accelerators, "use", lambda device: setattr(chosen, "device", device))
    seen = []
    interleaver = Interleaver(lambda: None, lambda _: None, torch.device("cuda:1"))

    def body() -> None:
        interleaver.meet()
        seen.append(str(chosen.device))

    interleaver.run([body, body, body])
    assert seen == ["cuda:1"] * 3
