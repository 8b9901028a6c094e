"""Backward passes from given gradients: the same as torch's, bit by bit."""

from typing import Any

import torch

from lockstep.capture.seeding import go_backward, seeded


def test_gradients_are_those_of_backward_with_gradients() -> None:
    torch.manual_seed(0)
    leaf, weight = torch.randn(3, 4).requires_grad_(), torch.randn(4, 5).requires_grad_()
    product, total = leaf @ weight, (leaf.sum() * weight).double()
    roots = [product, total, leaf]
    directions = [torch.randn_like(root) for root in roots]
    torch.autograd.backward(roots, directions, retain_graph=True)
    wanted: list[Any] = [leaf.grad, weight.grad]
    leaf.grad = weight.grad = None
    seeded(roots, directions).backward()
    found: list[Any] = [leaf.grad, weight.grad]
    assert all(map(torch.equal, found, wanted))
    leaf.grad = weight.grad = None
    go_backward([leaf @ weight, (leaf.sum() * weight).double(), leaf], directions)
    found = [leaf.grad, weight.grad]
    assert all(map(torch.equal, found, wanted))
    assert not any(direction.requires_grad for direction in directions)
