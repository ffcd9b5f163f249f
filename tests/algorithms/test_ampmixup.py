"""Amp-Mixup against its equation, with numpy's full spectra, shifts and angles in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agfa.algorithms import get
from agfa.algorithms.ampmixup import AmpMixup
from agfa.algorithms.base import Problem
from agfa.nn.backbones import Backbone, ConvNet
from support_methods import (
    SIZES,
    batch,
    build,
    descents,
    erm_gradients,
    in_bfloat16,
    resumed,
    slopes,
    update,
)


def transcribed_mixture(x: np.ndarray, other: np.ndarray, share: float, ratio: float) -> np.ndarray:
    """A channel with some of another's amplitude in a crop of the shifted spectrum, as the authors cut it."""
    crop = [int(n * math.sqrt(ratio)) for n in x.shape]
    corner = [n // 2 - c // 2 for n, c in zip(x.shape, crop, strict=True)]
    place = tuple(slice(start, start + c) for start, c in zip(corner, crop, strict=True))
    amplitude, theirs = (np.fft.fftshift(np.abs(np.fft.fft2(image))) for image in (x, other))
    amplitude[place] = share * theirs[place] + (1 - share) * amplitude[place]
    made = np.fft.ifft2(np.fft.ifftshift(amplitude) * np.exp(1j * np.angle(np.fft.fft2(x))))
    return np.clip(made.real, 0, 1)


def transcribed_mixtures(algorithm, x: torch.Tensor, seed: int) -> np.ndarray:
    """All mixtures of a minibatch, with the draws of that seed."""
    torch.manual_seed(seed)
    others = torch.randperm(len(x)).tolist()
    shares = (torch.rand(len(x), 1, 1, 1, dtype=x.dtype) * algorithm.hparams.alpha).flatten().tolist()
    images = x.numpy()
    made = np.empty_like(images)
    for i, (j, share) in enumerate(zip(others, shares, strict=True)):
        for c in range(images.shape[1]):
            made[i, c] = transcribed_mixture(images[i, c], images[j, c], share, algorithm.hparams.ratio)
    return made


def cross_entropy(network, images, labels) -> float:
    with torch.no_grad():
        f = network(torch.as_tensor(images)).numpy()
    return sum(math.log(np.exp(row).sum()) - row[y] for row, y in zip(f, labels.tolist(), strict=True)) / len(f)


@pytest.mark.parametrize("ratio", [1.0, 0.9, 0.5, 0.1, 0.0])
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (6, 5), (4, 6)])
def test_mixtures_are_those_of_full_spectra(size, ratio):
    problem = Problem(3, 3, 40, (2, *size))
    backbone = Backbone(ConvNet(2, widths=(8,)), 8, (0.5,) * 2, (0.5,) * 2, "tiny")
    algorithm = AmpMixup(backbone, problem, get("ampmixup").hparams({"ratio": ratio})).double()
    x = torch.rand(6, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    wanted = transcribed_mixtures(algorithm, x, seed=3)
    torch.manual_seed(3)
    mixed = algorithm.mixed(x)
    torch.testing.assert_close(mixed, torch.from_numpy(wanted), rtol=0, atol=1e-12)
    assert torch.equal(mixed, x) == (ratio == 0)


def test_amplitudes_are_mixed_and_phases_kept():
    algorithm = build("ampmixup")
    x = 0.4 + 0.2 * batch((4, 4)).images  # far from 0 and 1: nothing is clipped
    torch.manual_seed(3)
    others = torch.randperm(8)
    share = torch.rand(8, 1, 1, 1, dtype=x.dtype)
    torch.manual_seed(3)
    own, mixed = torch.fft.rfft2(x), torch.fft.rfft2(algorithm.mixed(x))
    torch.testing.assert_close(mixed.abs(), share * own.abs()[others] + (1 - share) * own.abs())
    torch.testing.assert_close(mixed / mixed.abs(), own / own.abs())


@pytest.mark.parametrize("flat", [0.0, 0.3, 1.0])
def test_flat_and_full_images_stay_within_bounds(flat):
    data = batch((4, 4))
    data.images[:3] = flat
    algorithm = build("ampmixup")
    assert update(algorithm, data)["nll"].isfinite()
    mixed = algorithm.mixed(data.images)
    assert mixed.min() >= 0
    assert mixed.max() <= 1


@pytest.mark.parametrize("alpha", [0.2, 1.0])
@pytest.mark.parametrize("sizes", [*SIZES, (1,), (5,)])
def test_loss_is_the_mean_over_images_and_mixtures(sizes, alpha):
    algorithm, data = build("ampmixup", len(sizes), alpha=alpha), batch(sizes)
    mixtures = transcribed_mixtures(algorithm, data.images, seed=3)
    each = [cross_entropy(algorithm.network, images, data.labels) for images in (data.images, mixtures)]
    assert descents(algorithm, data)[0].loss == pytest.approx(sum(each) / 2, rel=1e-9)
    assert update(algorithm, data)["nll"].item() == pytest.approx(sum(each) / 2, rel=1e-9)


@pytest.mark.parametrize("sizes", SIZES)
def test_gradient_agrees_with_finite_differences(sizes):
    slope, wanted = slopes(build("ampmixup", len(sizes)), batch(sizes))
    assert slope == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_without_alpha_the_gradient_is_that_of_erm(sizes):
    """To the last rounding: it is the mean over twice as many images."""
    algorithm, data = build("ampmixup", len(sizes), alpha=0), batch(sizes)
    for gradient, wanted in zip(descents(algorithm, data)[0].gradients, erm_gradients(algorithm, data), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)
    mixed = descents(build("ampmixup", len(sizes), alpha=1.0), data)[0].gradients
    assert not any(map(torch.allclose, mixed, erm_gradients(algorithm, data)))


def test_resumes():
    assert resumed("ampmixup", batch(), steps=3, at=1)


def test_autocast_leaves_spectra_and_loss_in_float32():
    algorithm, data = build("ampmixup"), batch()
    plain, cast = in_bfloat16(algorithm, data)
    assert cast["nll"].dtype == torch.float32
    torch.testing.assert_close(cast["nll"], plain["nll"], rtol=0.02, atol=0)
    algorithm, x = algorithm.float(), data.images.float()
    torch.manual_seed(3)
    wanted = algorithm.mixed(x)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(algorithm.mixed(x), wanted)
