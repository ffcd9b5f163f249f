"""Deep CORAL: correlation alignment for deep domain adaptation (Sun, Saenko; ECCV workshops 2016).

Features phi of every two domains should have the same mean m and the same covariance C:

    min_θ,W  R + γ·mean_{d<e} [ |m_d - m_e|²/k + |C_d - C_e|²_F/k² ],    k features, C by n - 1,

where R is ERM's risk. The mean over pairs of a squared distance is twice the variance over domains, which is how it
is computed. Means and weight are as in DomainBed; the paper matches covariances alone, and has 1/4 in front.
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


class Hparams(BaseHparams, frozen=True):
    """CORAL's hyperparameters, default and search as in DomainBed's settings."""

    penalty_weight: Annotated[float, LogUniform(0.1, 10)] = Field(
        1.0, ge=0, description="γ, weight of the distance; 0: ERM"
    )


class CORAL(Algorithm):
    """Correlation alignment."""

    name = "coral"
    title = "features of all domains with the same mean and covariance"
    paper = "Sun and Saenko 2016"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the risk and the distance between domains."""
        features = self.network.features(batch.images)
        nll = F.cross_entropy(self.network.head(features), batch.labels)
        penalty = distance(features, batch.sizes)
        descend(nll + self.hparams.penalty_weight * penalty, backward, self.optimizers["model"])
        return detached(nll=nll, penalty=penalty)


def distance(features: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Mean over pairs of domains of the squared distances of means and covariances, each divided by its length."""
    domains = features.split_with_sizes(sizes)
    with torch.autocast(features.device.type, enabled=False):
        means = torch.stack([phi.mean(0) for phi in domains])
        covariances = torch.stack([covariance(phi - m) for phi, m in zip(domains, means, strict=True)])
    return 2 * means.var(0).mean() + 2 * covariances.var(0).mean()


def covariance(centred: Tensor) -> Tensor:
    """Of features whose mean is 0; that of a single image is 0."""
    return centred.T @ centred / max(len(centred) - 1, 1)
