"""MTL: Domain Generalization by Marginal Transfer Learning (Blanchard, Deshmukh, Dogan, Lee, Scott; JMLR 2021), with
a network in place of the paper's kernel, as in DomainBed.

The classifier is also told the marginal distribution that an image comes from, by the mean of its features:

    min_θ,W  1/D Σ_d E_(x,y)~d [ -log softmax(W·[phi_θ(x), m_d] + b)_y ],
    m_d = ema·(mean of phi_θ over the batch's images of d) + (1 - ema)·(m_d of the step before, a constant).

**The model adapts to the batch it is given**: it predicts with the mean of that batch's features, so give it images
of one source together, as `agfa evaluate` does. An image on its own is its own mean.

DomainBed overwrites m_d with standard normal noise before the head sees it (`.normal_()`, its issue 159), in training
and in prediction, so that its published figures are ERM's with noise beside the features; here m_d is the mean. It
also sums the sources' losses, where the paper and this take their mean. There is no strength at which this is ERM.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from agfa.algorithms.base import Algorithm, Backward, Network, Problem, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import Choice
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone


class Hparams(BaseHparams, frozen=True):
    """Default and search as DomainBed and SWAD published them."""

    ema: Annotated[float, Choice((0.5, 0.9, 0.99, 1.0))] = Field(
        0.99, ge=0, le=1, description="share of the batch's own mean in a source's embedding"
    )


class MarginalNetwork(Network):
    """A network that adapts to the batch it is given: the head also sees the mean of the batch's features."""

    adapts = True

    def features(self, x: Tensor) -> Tensor:
        """[phi(x), the batch's mean]."""
        phi = self.backbone(x)
        return torch.cat([phi, phi.mean(0).expand_as(phi)], dim=1)


class MTL(Algorithm):
    """Marginal transfer learning."""

    name = "mtl"
    title = "a classifier that also sees the mean features of the images around"
    paper = "Blanchard et al. 2021"
    hparams_type = Hparams
    needs_domains = True

    hparams: Hparams
    embeddings: Tensor

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        self.register_buffer("embeddings", torch.zeros(problem.n_domains, backbone.n_features))

    @classmethod
    def make_network(cls, backbone: Backbone, problem: Problem, hparams: Hparams) -> Network:
        """The backbone with a linear head on features and mean."""
        return MarginalNetwork(backbone, nn.Linear(2 * backbone.n_features, problem.n_classes))

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the mean over sources of their cross-entropy."""
        ema, phi = self.hparams.ema, self.network.backbone(batch.images)
        means = torch.stack([of_domain.mean(0) for of_domain in phi.split_with_sizes(batch.sizes)])
        embeddings = ema * means + (1 - ema) * self.embeddings
        self.embeddings.copy_(embeddings.detach())
        logits = self.network.head(torch.cat([phi, embeddings[batch.domains]], dim=1))
        each = zip(logits.split_with_sizes(batch.sizes), batch.labels.split_with_sizes(batch.sizes), strict=True)
        loss = torch.stack([F.cross_entropy(f, y) for f, y in each]).mean()
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss)
