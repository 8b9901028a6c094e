"""Small and large objects from rank 0 to all, and from all to rank 0."""

import os
from typing import Any

import pytest
import torch

from tests.parallel import calls


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_hear_the_same_and_answers_come_by_rank(num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    objects: list[Any] = [
        None,
        {"a": [1, 2.0, "three"]},
        torch.randn(300, 1000, generator=generator),  # in shared memory
        "x" * 3_000_000,  # more than a socket holds
        [torch.tensor(1.5), torch.arange(0), b"bytes"],
        *range(50),
    ]
    team = calls.start_team(num_ranks)
    try:
        heard = calls.lead(team, objects)
        pids = [os.getpid(), *team.pids()]
    finally:
        team.close()
    assert len(heard) == len(objects)
    for said, ranks in zip(objects, heard, strict=True):
        assert [(rank, pid) for rank, pid, _ in ranks] == list(enumerate(pids))
        for _, _, repeated in ranks:
            assert is_same(repeated, said)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    return type(one) is type(other) and bool(one == other)
