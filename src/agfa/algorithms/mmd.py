"""Domain generalization with adversarial feature learning (Li, Pan, Wang, Kot; CVPR 2018), without its adversary.

Features phi of every two domains should have the same distribution, in the kernel's maximum mean discrepancy:

    min_θ,W  R + γ·mean_{d<e} MMD²(d, e),    MMD²(d, e) = K_dd + K_ee - 2·K_de,
    K_de = mean over images i of d and j of e of  Σ_g exp(-g·|phi_i - phi_j|²),    g = 0.001, 0.01, ..., 1000,

where R is ERM's risk. This is DomainBed's MMD, which the tables compare with: the paper also has an autoencoder and
an adversarial prior. Over all pairs of D domains the mean is 2·D/(D-1)·(mean_d K_dd - mean_de K_de).
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from agfa.algorithms.base import Algorithm, Backward, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import LogUniform
from agfa.data.batches import Batch

BANDWIDTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


class Hparams(BaseHparams, frozen=True):
    """MMD's hyperparameters, default and search as in DomainBed's settings."""

    penalty_weight: Annotated[float, LogUniform(0.1, 10)] = Field(
        1.0, ge=0, description="γ, weight of the discrepancy; 0: ERM"
    )


class MMD(Algorithm):
    """Maximum mean discrepancy between domains."""

    name = "mmd"
    title = "features of all domains with the same distribution, by a Gaussian kernel"
    paper = "Li et al. 2018"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the risk and the discrepancy between domains."""
        features = self.network.features(batch.images)
        nll = F.cross_entropy(self.network.head(features), batch.labels)
        penalty = discrepancy(features, batch.sizes)
        descend(nll + self.hparams.penalty_weight * penalty, backward, self.optimizers["model"])
        return detached(nll=nll, penalty=penalty)


def discrepancy(features: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Mean over pairs of domains of MMD²."""
    kernels = gaussian(features).split_with_sizes(sizes)
    k = torch.stack([block.mean() for rows in kernels for block in rows.split_with_sizes(sizes, dim=1)])
    k = k.view(len(sizes), len(sizes))
    return 2 * len(sizes) / (len(sizes) - 1) * (k.diagonal().mean() - k.mean())


def gaussian(features: Tensor) -> Tensor:
    """Σ_g exp(-g·|phi_i - phi_j|²) of every two images, in full precision under autocast too."""
    with torch.autocast(features.device.type, enabled=False):
        # differences, and not the product of features: with g = 1000 its rounding would show
        squared = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist").square()
        return torch.stack([torch.exp(-g * squared) for g in BANDWIDTHS]).sum(0)
