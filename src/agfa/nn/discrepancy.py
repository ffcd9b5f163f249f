"""How far apart the plausible classifiers of a Gaussian posterior can be on a batch: SMCD and MCD.

Each logit f_j is N(mu_j, sigma_j²); its plausible range is mu_j ± Z·sigma_j.
"""

from __future__ import annotations

import torch
from torch import Tensor

Z = 1.96  # a logit leaves its range on one side with a chance of 2.5%


def smcd(mu: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
    """Supervised: mean of (1 + max_{j≠y}(mu_j + Z·sigma_j) - (mu_y - Z·sigma_y))₊."""
    label = labels.unsqueeze(-1)
    lowest = (mu - Z * sigma).gather(-1, label).squeeze(-1)
    rivals = (mu + Z * sigma).scatter(-1, label, -torch.inf)
    return (1 + rivals.max(dim=-1).values - lowest).relu().mean()


def mcd(mu: Tensor, sigma: Tensor) -> Tensor:
    """Unsupervised: mean of (1 + T²(mu + Z·sigma) - T¹(mu - Z·sigma))₊, Tᵏ the k-th largest over classes.

    The paper's top-k form: T² and T¹ may pick the same class.
    """
    lowest = (mu - Z * sigma).max(dim=-1).values
    runner_up = (mu + Z * sigma).topk(2, dim=-1).values[..., 1]
    return (1 + runner_up - lowest).relu().mean()
