"""The predictive distribution against products of Gauss-Hermite sums in float64, and against plain draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from agfa.nn.predictive import WIDE, closed_form, disagreement, mean_softmax, predictive, sampled


def gaussian_logits(classes: int, sigma: float, n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits far apart, close, and in between; no sigma above the given one."""
    generator = torch.Generator().manual_seed(seed)
    mu = torch.randn(n, classes, generator=generator, dtype=torch.float64) * torch.logspace(-1, 1, n)[:, None]
    return mu, sigma * (1 - 0.4 * torch.rand(n, classes, generator=generator, dtype=torch.float64))


def exactly(mu: Tensor, sigma: Tensor, nodes: int = 24) -> Tensor:
    """E[softmax] of up to three classes by a grid over all logits together."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    total = torch.zeros_like(mu)
    for places in itertools.product(range(nodes), repeat=mu.shape[1]):
        weight = math.prod(w[i] for i in places) / math.sqrt(2 * math.pi) ** mu.shape[1]
        total += weight * (mu + sigma * torch.tensor(x[list(places)])).softmax(-1)
    return total


def drawn(mu: Tensor, sigma: Tensor, draws: int = 100_000) -> Tensor:
    """Draws of the logits, (draws, n, C)."""
    return mu + sigma * torch.randn(draws, *mu.shape, generator=torch.Generator().manual_seed(1), dtype=mu.dtype)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    ("sigma", "close", "monte_carlo"), [(0.01, 1e-6, 1e-4), (0.2, 1e-3, 1e-3), (WIDE, 0.01, 0.003)]
)
def test_both_forms_agree_with_the_integral_and_with_each_other(classes, sigma, close, monte_carlo):
    mu, sd = gaussian_logits(classes, sigma)
    wanted = exactly(mu, sd)
    assert (closed_form(mu, sd) - wanted).abs().max() < close
    assert (sampled(mu, sd) - wanted).abs().max() < monte_carlo
    assert (closed_form(mu, sd) - sampled(mu, sd)).abs().max() < 0.01


@pytest.mark.parametrize("classes", [7, 65, 345])
def test_they_agree_for_many_classes(classes):
    mu, sd = gaussian_logits(classes, WIDE, n=12)
    wanted = drawn(mu, sd, 4000 if classes > 100 else 20_000).softmax(-1).mean(0)
    assert (closed_form(mu, sd) - wanted).abs().max() < 0.015
    assert (sampled(mu, sd) - wanted).abs().max() < 0.015
    assert (closed_form(mu, sd) - sampled(mu, sd)).abs().max() < 0.01


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
def test_what_is_told_is_within_002_however_wide_the_posterior(classes, sigma):
    mu, sd = gaussian_logits(classes, sigma)
    wanted = drawn(mu, sd, 20_000).softmax(-1).mean(0)  # a standard error of at most 0.0036
    assert (mean_softmax(mu, sd) - wanted).abs().max() < 0.02 + 0.01
    torch.testing.assert_close(mean_softmax(mu, sd).sum(-1), torch.ones(len(mu), dtype=torch.float64))


def test_the_closed_form_is_not_the_softmax_of_the_means():
    """The tolerances above say something: without the variance they fail."""
    mu, sd = gaussian_logits(3, WIDE)
    assert (mu.softmax(-1) - exactly(mu, sd)).abs().max() > 0.015
    assert (mu.softmax(-1) - exactly(mu, sd)).abs().max() > 4 * (closed_form(mu, sd) - exactly(mu, sd)).abs().max()


def test_draws_are_for_images_of_wide_posteriors_alone():
    narrow, wide = gaussian_logits(4, 0.3, n=5), gaussian_logits(4, 2.0, n=5)
    mu, sd = torch.cat([narrow[0], wide[0]]), torch.cat([narrow[1], wide[1]])
    told = mean_softmax(mu, sd)
    assert torch.equal(told[:5], closed_form(*narrow))
    assert torch.equal(told[5:], sampled(*wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite(dtype):
    mu = torch.tensor([[0.0, 0, 0], [80, -80, 0], [1e4, 0, -1e4], [0, 0, 0]], dtype=dtype)
    sd = torch.tensor([[1e-6] * 3, [1e-6, 1, 100], [0.3] * 3, [1e-6, 50, 50]], dtype=dtype)
    probabilities, differ = predictive(mu, sd, 0.1)
    assert probabilities.isfinite().all()
    assert differ.isfinite().all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(4, dtype=dtype))
    torch.testing.assert_close(probabilities[0], torch.full((3,), 1 / 3, dtype=dtype))
    assert ((differ >= 0) & (differ <= 2 / 3 + 1e-5)).all()


def test_a_single_class_is_certain():
    probabilities, differ = predictive(torch.zeros(2, 1), torch.ones(2, 1))
    assert (probabilities == 1).all()
    assert (differ == 0).all()


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("sigma", [0.1, 1.0, 5.0])
def test_disagreement_is_that_of_two_drawn_classifiers(classes, sigma):
    mu, sd = gaussian_logits(classes, sigma)
    chosen = torch.nn.functional.one_hot(drawn(mu, sd, 20_000).argmax(-1), classes).double()
    wanted = 1 - (chosen[::2] * chosen[1::2]).sum(-1).mean(0)  # of 10,000 pairs: a standard error of at most 0.005
    assert (disagreement(mu, sd) - wanted).abs().max() < 0.02
    assert wanted.max() > 0.3


def test_disagreement_of_two_classes_is_known():
    gap, a, b = torch.tensor([0.0, 0.5, 1, 3, 5, 8], dtype=torch.float64), 0.6, 0.8
    mu = torch.stack([gap, torch.zeros_like(gap)], -1)
    sd = torch.tensor([[a, b]], dtype=torch.float64).expand(6, 2)
    wins = torch.special.ndtr(gap / math.hypot(a, b))
    wanted = 2 * wins * torch.special.ndtr(-gap / math.hypot(a, b))
    torch.testing.assert_close(disagreement(mu, sd), wanted, rtol=0.02, atol=1e-12)
    torch.testing.assert_close(disagreement(mu.float(), sd.float()).double(), wanted, rtol=0.03, atol=1e-7)
    assert (disagreement(mu, sd).diff() < 0).all()  # little is told from less: images can be ranked by it


def test_temperature_divides_the_logits_and_leaves_choices_alone():
    mu, sd = gaussian_logits(3, 1.0)
    hot, plain = predictive(mu, sd, 4.0), predictive(mu, sd)
    assert (hot.probabilities - exactly(mu / 4, sd / 4)).abs().max() < 0.01
    assert torch.equal(hot.disagreement, plain.disagreement)
    assert torch.equal(predictive(mu, None, 4.0).probabilities, (mu / 4).softmax(-1))
    assert predictive(mu, None).disagreement is None


def test_no_random_number_is_taken_and_no_image_depends_on_another():
    mu, sd = gaussian_logits(5, 1.0)
    before = torch.get_rng_state()
    together = predictive(mu, sd)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(predictive(mu, sd).probabilities, together.probabilities)
    for i in range(0, 60, 7):
        alone = predictive(mu[i : i + 1], sd[i : i + 1])
        torch.testing.assert_close(alone.probabilities[0], together.probabilities[i])
        torch.testing.assert_close(alone.disagreement[0], together.disagreement[i])
