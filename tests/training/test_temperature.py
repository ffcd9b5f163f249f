"""The temperature against a brute-force grid, and where the loss has no minimum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from agfa.nn.predictive import mean_softmax, predictive
from agfa.training.temperature import COLDEST, HOTTEST, fit_temperature, nll


def validation(true: float, n: int = 400, classes: int = 5, sigma: float | None = None, seed: int = 0):
    """Logits, and labels drawn from their predictive distribution at the temperature `true`."""
    generator = torch.Generator().manual_seed(seed)
    mu = 3 * torch.randn(n, classes, generator=generator)
    sd = None if sigma is None else sigma * (0.5 + torch.rand(n, classes, generator=generator))
    labels = predictive(mu, sd, true).probabilities.multinomial(1, generator=generator)[:, 0]
    return mu, sd, labels


def brute_force(mu: Tensor, sigma: Tensor | None, labels: Tensor) -> float:
    """The best of many temperatures, a percent or less apart; for an ordinary head by hand."""
    temperatures = np.geomspace(COLDEST, HOTTEST, 801 if sigma is None else 401)
    if sigma is not None:
        mu, sigma = mu.double(), sigma.double()
        losses = [-mean_softmax(mu / t, sigma / t)[range(len(mu)), labels].log().mean().item() for t in temperatures]
        return float(temperatures[int(np.argmin(losses))])
    images = list(zip((mu - mu.amax(-1, keepdim=True)).tolist(), labels.tolist(), strict=True))
    losses = [sum(math.log(sum(math.exp(v / t) for v in f)) - f[y] / t for f, y in images) for t in temperatures]
    return float(temperatures[int(np.argmin(losses))])


@pytest.mark.parametrize("true", [0.4, 2.5])
def test_an_ordinary_heads_is_the_best_of_a_fine_grid(true):
    mu, sd, labels = validation(true, n=100)
    assert fit_temperature(mu, sd, labels) == pytest.approx(brute_force(mu, sd, labels), rel=0.006)


@pytest.mark.parametrize(("true", "sigma"), [(0.7, 0.2), (3.0, 2.0)])
def test_a_bayesian_heads_too(true, sigma):
    mu, sd, labels = validation(true, n=60, sigma=sigma)
    found, best = fit_temperature(mu, sd, labels), brute_force(mu, sd, labels)
    assert found == pytest.approx(best, rel=0.01)
    assert nll(mu.double(), sd.double(), labels, found) <= nll(mu.double(), sd.double(), labels, best) + 1e-9


@pytest.mark.parametrize("true", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("sigma", [None, 0.3])
def test_it_finds_the_temperature_that_made_the_labels(true, sigma):
    found = fit_temperature(*validation(true, n=4000, sigma=sigma))
    assert found == pytest.approx(true, rel=0.1)


def test_all_right_all_wrong_and_none():
    mu = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    right, sd = torch.tensor([0, 1, 0]), torch.full((3, 2), 0.1)
    for sigma in (None, sd):
        assert fit_temperature(mu, sigma, right) == pytest.approx(COLDEST, rel=0.01)
        assert fit_temperature(mu, sigma, 1 - right) == pytest.approx(HOTTEST, rel=0.01)
        assert fit_temperature(mu[:0], sigma if sigma is None else sigma[:0], right[:0]) == 1.0


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e6])
def test_extreme_logits_give_a_temperature_within_its_bounds(scale):
    mu, sd, labels = validation(1.0, n=50, sigma=0.2)
    for sigma in (None, sd * max(scale, 1e-6)):
        assert COLDEST <= fit_temperature(mu * scale, sigma, labels) <= HOTTEST


def test_the_loss_is_of_all_images_however_they_are_cut():
    mu, sd, labels = validation(1.0, n=101, sigma=0.2)
    whole = nll(mu.double(), sd.double(), labels, 2.0, chunk=10**9)
    assert nll(mu.double(), sd.double(), labels, 2.0, chunk=35) == pytest.approx(whole, rel=1e-12)


def test_many_images_are_thinned(monkeypatch):
    mu, sd, labels = validation(2.0, n=3000)
    full = fit_temperature(mu, sd, labels)
    monkeypatch.setattr("agfa.training.temperature.ENOUGH", 5 * 1000)
    assert fit_temperature(mu, sd, labels) == fit_temperature(mu[::3], sd, labels[::3])
    assert fit_temperature(mu, sd, labels) == pytest.approx(full, rel=0.15)
