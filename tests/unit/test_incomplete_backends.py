"""What stands in where a device's own functions are incomplete, against torch's on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import accelerators
from lockstep.frontends.keras.optim import fused_adam
from lockstep.parallel.data_parallel.batch_norm import updating_statistics

States = tuple[dict[str, torch.Tensor], list[torch.Tensor]]


def passed(layer: nn.Module, inputs: torch.Tensor) -> States:
    """The layer's state after a training pass, and outputs and gradients of it and of another."""
    inputs = inputs.clone().requires_grad_()
    outputs = layer.train()(inputs)
    gradients = torch.autograd.grad((outputs**3).sum(), [inputs, *layer.parameters()])
    return dict(layer.state_dict()), [outputs, *gradients, layer.eval()(inputs)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 3, 2)])
def test_batch_norm(shape: tuple[int, ...], tracks: bool, affine: bool) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    inputs = 3 * torch.randn(shape, dtype=torch.float64) + 1
    layers = [kind(4, affine=affine, track_running_stats=tracks).double() for _ in range(2)]
    expected = passed(layers[0], inputs)
    with updating_statistics():
        found = passed(layers[1], inputs)
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-13, atol=1e-13)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_batch_norm_of_one_value_is_refused() -> None:
    with updating_statistics(), pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(4)(torch.ones(1, 4))


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention(is_causal: bool) -> None:
    query, key, value = (
        torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    results = []
    for attend in (F.scaled_dot_product_attention, accelerators.attention_in_steps):
        output = attend(query, key, value, is_causal=is_causal, scale=0.3)
        results.append([output, *torch.autograd.grad((output**2).sum(), [query, key, value])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_cpu_lacks_nothing() -> None:
    cpu = torch.device("cpu")
    assert accelerators.has_whole_batch_norm(cpu)
    assert not accelerators.rounds_attention(cpu)


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("meta", False)])
def test_the_kernel_of_keras_adam_is_for_cpus(device: str, expected: bool) -> None:
    """TPUs refuse it, and some stand-ins do not."""
    tensors = [torch.empty(3, device=device) for _ in range(4)]
    assert fused_adam._is_taken(*tensors) == expected
