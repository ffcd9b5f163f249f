"""The Bayesian head: from features to Gaussian logits (the usual head is torch's nn.Linear)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agfa.nn.predictive import Predictive, predictive


class BayesianLinear(nn.Module):
    """Q(W) = prod_j N(w_j; m_j, diag v_j), prior N(0, I), no bias.

    The logits of features phi are Gaussian: mu = phi·mᵀ, sigma² = phi²·vᵀ. So they are sampled, and not W:
    the same marginals, n·C numbers a sample where W has C·d. Calling the head gives mu.
    Everything here is float32 (or float64), even under autocast.
    """

    def __init__(self, n_features: int, n_classes: int, initial_sd: float = 0.01) -> None:
        super().__init__()
        bound = 1 / math.sqrt(n_features)  # as nn.Linear's
        self.mean = nn.Parameter(torch.empty(n_classes, n_features).uniform_(-bound, bound))
        self.log_variance = nn.Parameter(torch.full((n_classes, n_features), 2 * math.log(initial_sd)))

    def forward(self, features: Tensor) -> Tensor:
        """The logits at the posterior means."""
        with torch.autocast(features.device.type, enabled=False):
            return features.to(self.mean.dtype) @ self.mean.T

    def moments(self, features: Tensor, frozen: bool = False) -> tuple[Tensor, Tensor]:
        """mu and sigma of the logits; `frozen` takes m and v as constants."""
        mean = self.mean.detach() if frozen else self.mean
        log_variance = self.log_variance.detach() if frozen else self.log_variance
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(mean.dtype)
            mu = features @ mean.T
            variance = features.square() @ log_variance.exp().T
        return mu, (variance + 1e-12).sqrt()  # the root of 0 has no gradient

    def expected_nll(self, features: Tensor, labels: Tensor, samples: int = 50) -> Tensor:
        """E_Q[-log P(y | x, W)], mean over images, by Monte Carlo over the logits."""
        mu, sigma = self.moments(features)
        logits = mu + sigma * torch.randn(samples, *mu.shape, device=mu.device, dtype=mu.dtype)
        return F.cross_entropy(logits.flatten(0, 1), labels.repeat(samples))

    def kl(self) -> Tensor:
        """KL(Q(W) || N(0, I)), in closed form."""
        rho = self.log_variance
        return 0.5 * (rho.exp() + self.mean.square() - 1 - rho).sum()

    @torch.no_grad()
    def predictive(self, features: Tensor, temperature: float = 1.0) -> Predictive:
        """Predictive probabilities and disagreement; the same for an image whatever batch it comes in."""
        return predictive(*self.moments(features), temperature)


def logits_of(head: nn.Module, features: Tensor) -> tuple[Tensor, Tensor | None]:
    """Means and deviations of any head's logits, in float32; no deviations where it is a single classifier."""
    if isinstance(head, BayesianLinear):
        return head.moments(features)
    return head(features).float(), None
