"""Backward passes from given gradients: the same as torch's, bit by bit."""

import torch

from lockstep.capture.seeding import seeded


def test_gradients_are_those_of_backward_with_gradients() -> None:
    torch.manual_seed(0)
    leaf, weight = torch.randn(3, 4).requires_grad_(), torch.randn(4, 5).requires_grad_()
    product, total = leaf @ weight, (leaf.sum() * weight).double()
    roots = [product, total, leaf]
    directions = [torch.randn_like(root) for root in roots]
    torch.autograd.backward(roots, directions, retain_graph=True)
    wanted = [leaf.grad, weight.grad]
    leaf.grad = weight.grad = None
    seeded(roots, directions).backward()
    assert all(map(torch.equal, [leaf.grad, weight.grad], wanted))
    assert not any(direction.requires_grad for direction in directions)
