"""RMSNorm as towers run it on a CPU, against PyTorch's own in float64: what GPUs run is PyTorch's."""

import pytest
import torch
from torch.nn import functional as F

from gridtower.modeling.vision_layers import RMSNorm

EPS = 1e-5


def make_norm(width: int) -> RMSNorm:
    torch.manual_seed(0)
    norm = RMSNorm(width, EPS)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


@pytest.mark.parametrize("shape", [(7, 96), (5, 4, 64), (1200, 1024)], ids=["patches", "heads", "several blocks"])
def test_norm_and_its_gradients_are_those_of_pytorch(shape):
    norm = make_norm(shape[-1])
    states = torch.randn(shape).mul_(3)
    states[2] = 0  # as padding gives
    states.requires_grad_()
    outputs = norm(states)
    passed_back = torch.randn(shape)
    gradients = torch.autograd.grad(outputs, (states, norm.weight), passed_back)

    exact = [tensor.detach().double().requires_grad_() for tensor in (states, norm.weight)]
    expected = F.rms_norm(exact[0], shape[-1:], exact[1], EPS)
    expected_gradients = torch.autograd.grad(expected, exact, passed_back.double())
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-5)


def test_norm_of_bfloat16_states_is_rounded_once():
    norm = make_norm(256)
    states = torch.randn(64, 256).bfloat16()
    expected = F.rms_norm(states.double(), (256,), norm.weight.double(), EPS).bfloat16()
    outputs = norm(states)
    assert outputs.dtype == torch.bfloat16
    # Sums in float32 fall on the other side of a rounding now and then; a second rounding changes a quarter of all.
    assert (outputs == expected).float().mean() > 0.995
