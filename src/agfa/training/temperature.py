"""The temperature of a model's predictive distribution, from images of its sources that it did not learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from agfa.nn.predictive import mean_softmax
from agfa.training.evaluate import Answers, Place

COLDEST, HOTTEST = 0.25, 10.0  # where every answer is right, or none, the loss alone has no minimum
ENOUGH = 2**20  # logits: a number with two or three digits needs no more, and they are gone through 40 times


def source_temperature(said: Mapping[Place, Answers]) -> float:
    """The temperature of a model, from what it says of its sources' validation images, and of no others."""
    val = [of for (role, _, split), of in said.items() if (role, split) == ("source", "val")]
    mu, labels = torch.cat([of.mu for of in val]).cpu(), torch.cat([of.labels for of in val]).cpu()
    deviations = [of.sigma for of in val if of.sigma is not None]
    return fit_temperature(mu, torch.cat(deviations).cpu() if deviations else None, labels)


def fit_temperature(mu: Tensor, sigma: Tensor | None, labels: Tensor) -> float:
    """The temperature with the least mean -log p(y | x): the best of a grid, then Brent's method beside it."""
    step = max(1, math.ceil(mu.numel() / ENOUGH))
    mu, labels = mu[::step].double(), labels[::step]
    sigma = None if sigma is None else sigma[::step].double()
    if not len(labels):
        return 1.0

    def loss(log_temperature: float) -> float:
        return nll(mu, sigma, labels, math.exp(log_temperature))

    low, high = math.log(COLDEST), math.log(HOTTEST)
    width = (high - low) / 20
    grid = [low + i * width for i in range(21)]
    best = min(grid, key=loss)
    bounds = max(low, best - width), min(high, best + width)
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-5})
    return round(math.exp(min(best, float(found.x), key=loss)), 4)


def nll(mu: Tensor, sigma: Tensor | None, labels: Tensor, temperature: float, chunk: int = 2**14) -> float:
    """Mean -log p(y | x) at a temperature."""
    total, images = 0.0, max(1, chunk // mu.shape[-1])
    for i in range(0, len(mu), images):
        some = slice(i, i + images)
        if sigma is None:
            log_p = (mu[some] / temperature).log_softmax(-1)
        else:
            log_p = mean_softmax(mu[some] / temperature, sigma[some] / temperature).clamp_min(1e-300).log()
        total -= log_p.gather(1, labels[some, None]).sum().item()
    return total / len(labels)
