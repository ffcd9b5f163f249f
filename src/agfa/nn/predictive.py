"""From logits, Gaussian or not, to what one may be told: probabilities, and how far the posterior disagrees.

All are functions of the logits' means mu and standard deviations sigma, independent between classes, (n, C); sigma is
None where the head is a single classifier. Everything is the same for an image whatever batch it comes in, and at
every call.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

WIDE = 0.5  # up to this sigma the closed form is within 0.01 of E[softmax], for any number of classes
DRAWS = 256
CELLS = 128


class Predictive(NamedTuple):
    """What a head says of each image.

    `probabilities`: E[softmax(f / temperature)], shape (n, C).
    `disagreement`: the chance that two classifiers drawn from the posterior choose different classes, (n,);
    None where there is one classifier only.
    """

    probabilities: Tensor
    disagreement: Tensor | None


@torch.no_grad()
def predictive(mu: Tensor, sigma: Tensor | None, temperature: float = 1.0) -> Predictive:
    """The predictive distribution: in closed form where that is close, by draws for images with a wider posterior.

    The temperature divides the logits, mean and deviation alike; what a classifier chooses does not depend on it.
    """
    if sigma is None:
        return Predictive((mu / temperature).softmax(-1), None)
    return Predictive(mean_softmax(mu / temperature, sigma / temperature), disagreement(mu, sigma))


def mean_softmax(mu: Tensor, sigma: Tensor) -> Tensor:
    """E[softmax(f)], within 0.02."""
    probabilities = closed_form(mu, sigma)
    wide = (sigma > WIDE).any(-1)
    if wide.any():
        probabilities[wide] = sampled(mu[wide], sigma[wide])
    return probabilities


def closed_form(mu: Tensor, sigma: Tensor) -> Tensor:
    """E[softmax(f)] for narrow posteriors.

    softmax(f)_k = sigmoid(f_k - log sum_{j≠k} exp f_j). The sum of log-normals is taken as log-normal with the same
    mean and variance (Fenton and Wilkinson), so the sigmoid's argument as Gaussian; its mean is a sum of five.
    """
    if mu.shape[-1] == 1:
        return torch.ones_like(mu)
    variance = sigma.square()
    log_mean = _of_others(mu + variance / 2)
    log_expm1 = variance / 2 + (2 * (variance / 2).sinh()).log()  # log(exp(v) - 1), exact once exported too
    log_variance = _of_others(2 * mu + variance + log_expm1)
    of_log = (log_variance - 2 * log_mean).exp().log1p()
    margin, spread = mu - log_mean + of_log / 2, (variance + of_log).sqrt()
    nodes, weights = hermegauss(5)
    probabilities = sum(
        weight * (margin + node * spread).sigmoid()
        for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True)
    )
    assert isinstance(probabilities, Tensor)
    return probabilities / probabilities.sum(-1, keepdim=True)


def sampled(mu: Tensor, sigma: Tensor, draws: int = DRAWS) -> Tensor:
    """E[softmax(f)] by Monte Carlo over evenly spread draws, shared by all images."""
    return (mu + sigma * even_noise(draws, mu.shape[-1]).to(mu)).softmax(-1).mean(0)


def disagreement(mu: Tensor, sigma: Tensor) -> Tensor:
    """The chance that argmax f and argmax f', f and f' independent, differ.

    P(argmax f = k) is the integral of d log F_k along the distribution prod_j F_j of the largest logit: a sum over
    the cells in which that is to be found.
    """
    low, high = (mu - 6 * sigma).amax(-1), (mu + 6 * sigma).amax(-1)
    edges = torch.linspace(0, 1, CELLS + 1).to(mu)
    at = low[:, None] + (high - low)[:, None] * edges
    log_f: Tensor = torch.special.log_ndtr((at[:, None] - mu[..., None]) / sigma[..., None])  # (n, C, cells + 1)
    log_g = log_f.sum(1)
    rise, total = log_f.diff(), log_g.diff()[:, None].clamp(min=torch.finfo(mu.dtype).tiny)
    wins = (log_g.exp().diff()[:, None] * rise / total).sum(-1)
    wins = wins / wins.sum(-1, keepdim=True)
    # of the winner and the rest, so that little is not lost beside 1
    best = F.one_hot(wins.argmax(-1), mu.shape[-1]).to(torch.bool)
    rest = wins.masked_fill(best, 0)
    lost = rest.sum(-1)
    return (1 - lost) * lost + (rest * (1 - rest)).sum(-1)


def _of_others(x: Tensor) -> Tensor:
    """For each class, log sum exp of x over the others, in operations that exporters keep exact."""
    top = x.argmax(-1, keepdim=True) == torch.arange(x.shape[-1], device=x.device)
    rest = x.masked_fill(top, -math.inf)
    most, second = x.amax(-1, keepdim=True), rest.amax(-1, keepdim=True)
    shares = (x - most).exp()  # 1 for the largest, so that of the others something is left
    of_top = (rest - second).exp().sum(-1, keepdim=True).log() + second
    return torch.where(top, of_top, (shares.sum(-1, keepdim=True) - shares).log() + most)


@lru_cache(maxsize=8)
def even_noise(draws: int, classes: int) -> Tensor:
    """Standard normal numbers (draws, 1, classes) that fill their space evenly (Sobol); always the same."""
    engine = torch.quasirandom.SobolEngine(classes, scramble=True, seed=0)  # type: ignore[no-untyped-call]
    noise: Tensor = torch.special.ndtri(engine.draw(draws, dtype=torch.float64).clamp(1e-6, 1 - 1e-6))
    return noise[:, None]
