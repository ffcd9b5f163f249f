"""Mixing two images, and learning both their labels in the same proportion."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def beta(alpha: float, n: int) -> Tensor:
    """n draws from Beta(alpha, alpha), in host memory; ones, the limit without mixing, where alpha is 0."""
    if alpha == 0:
        return torch.ones(n)
    return torch.distributions.Beta(alpha, alpha).sample((n,))


def mix(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """share·one + (1 - share)·other."""
    return share * one + (1 - share) * other


def mixed_cross_entropy(logits: Tensor, labels: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """Mean of share·CE(logits, labels) + (1 - share)·CE(logits, others)."""
    one, other = (F.cross_entropy(logits, target, reduction="none") for target in (labels, others))
    return mix(one, other, share).mean()
