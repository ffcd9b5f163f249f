"""Generators: what range and shape their outputs have, what noise they take, and the reversed gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agfa.nn.generators import AmplitudeGenerator, PixelGenerator, reverse_gradient
from agfa.nn.spectrum import symmetric

SIZES = [(1, 1), (4, 4), (5, 7), (6, 5), (28, 28)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("hidden", [None, 100])
def test_amplitude_is_a_non_negative_symmetric_half_spectrum(size, channels, hidden):
    generator = AmplitudeGenerator(channels, size, hidden)
    made = generator(4)
    assert made.shape == (4, channels, size[0], size[1] // 2 + 1)
    assert (made >= 0).all()
    assert torch.equal(symmetric(made, size[1]), made)
    x = torch.fft.irfft2(made.double().to(torch.complex128), s=size, norm="ortho")
    torch.testing.assert_close(torch.fft.rfft2(x, norm="ortho").abs(), made.double(), atol=1e-12, rtol=0)


def test_amplitude_stays_non_negative_for_large_weights():
    generator = AmplitudeGenerator(1, (5, 6))
    with torch.no_grad():
        generator.layers.weight.mul_(1e3)
    made = generator(20)
    assert (made >= 0).all()
    assert made.isfinite().all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("hidden", [None, 100])
def test_pixels_are_images_in_the_unit_interval(size, hidden):
    made = PixelGenerator(3, size, hidden)(4)
    assert made.shape == (4, 3, *size)
    assert ((made >= 0) & (made <= 1)).all()


@pytest.mark.parametrize("kind", [AmplitudeGenerator, PixelGenerator])
def test_linear_is_one_affine_map_and_mlp_has_one_hidden_layer(kind):
    linear, mlp = kind(2, (4, 5)), kind(2, (4, 5), hidden=100)
    assert [type(m) for m in linear.modules() if not list(m.children())] == [nn.Linear]
    first, _, last = mlp.layers
    assert (first.in_features, first.out_features, last.in_features) == (100, 100, 100)
    assert linear.layers.in_features == linear.noise == 100


@pytest.mark.parametrize("hidden", [None, 7])
def test_output_is_the_network_of_standard_normal_noise(hidden):
    generator = AmplitudeGenerator(2, (4, 5), hidden).double()
    torch.manual_seed(1)
    made = generator(3)
    torch.manual_seed(1)
    eps = torch.randn(3, 100, dtype=torch.float64)
    raw = generator.layers(eps).view(3, 2, 4, 3)
    torch.testing.assert_close(made, symmetric((1 + raw.exp()).log(), 5))


@pytest.mark.parametrize("generator", [AmplitudeGenerator(1, (4, 4)), PixelGenerator(1, (4, 4), 10)])
def test_noise_is_fresh_for_every_image_and_call_and_reproducible_by_seed(generator):
    torch.manual_seed(0)
    first, second = generator(2), generator(2)
    torch.manual_seed(0)
    again = generator(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_autocast_leaves_the_amplitude_in_float32():
    generator = AmplitudeGenerator(3, (8, 8), 10)
    torch.manual_seed(0)
    plain = generator(2)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = generator(2)
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 0.1, 10.0])
def test_reversed_gradient_is_the_negative_scaled_one_of_the_same_value(scale):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64)
    value = reverse_gradient(x, scale)
    assert torch.equal(value, x)
    (gradient,) = torch.autograd.grad(F.mse_loss(value, weight), x)
    (plain,) = torch.autograd.grad(F.mse_loss(x, weight), x)
    torch.testing.assert_close(gradient, -scale * plain)
