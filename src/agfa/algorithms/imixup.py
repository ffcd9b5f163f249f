"""Inter-domain mixup, DomainBed's "Mixup": three papers mix images across domains and learn both labels.

- Adversarial domain adaptation with domain mixup (Xu, Zhang, Ni, Li, Wang, Tian, Zhang; AAAI 2020)
- Improve unsupervised domain adaptation with mixup training (Yan, Song, Li, Zou, Ren; 2020)
- Heterogeneous domain generalization via domain mixup (Wang, Li, Kot; ICASSP 2020)

The domains are put in a random order π; images of π(d) are mixed with those of the next, e = π(d + 1 mod D):

    x~ = λ_d·x_d + (1-λ_d)·x_e,    λ_d ~ Beta(α, α),  one a pair of domains
    min_θ  mean_d E [ λ_d·CE(f_θ(x~), y_d) + (1-λ_d)·CE(f_θ(x~), y_e) ]

All pairs go through the network together. Where the next domain shows fewer images they are used again (DomainBed
leaves off the surplus), so that every image counts once as the first.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agfa.algorithms.base import Algorithm, Backward, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import LogUniform
from agfa.data.batches import Batch
from agfa.nn.mixup import beta, mix, mixed_cross_entropy


class Hparams(BaseHparams, frozen=True):
    """Inter-domain mixup's hyperparameters, default and search as in DomainBed's settings."""

    alpha: Annotated[float, LogUniform(0.1, 10)] = Field(0.2, ge=0, description="of Beta(α, α); 0: nothing is mixed")


class InterDomainMixup(Algorithm):
    """Mixup between domains."""

    name = "imixup"
    title = "cross-entropy on mixtures of images, and labels, of two domains"
    paper = "Xu et al., Yan et al., Wang et al. 2020"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the mixed minibatch."""
        x, y, *_ = batch
        i, j, sizes = partners(batch.sizes)
        share = beta(self.hparams.alpha, len(sizes)).repeat_interleave(sizes).to(x)
        i, j = (places.to(x.device, non_blocking=True) for places in (i, j))
        logits = self.network(mix(x[i], x[j], share.view(-1, 1, 1, 1)))
        loss = mixed_cross_entropy(logits, y[i], y[j], share)
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss)


def partners(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The domains in a random order, each with the next: places of both in the minibatch, and numbers of pairs."""
    places = torch.arange(sum(sizes)).split_with_sizes(sizes)
    order = torch.randperm(len(sizes)).tolist()
    pairs = [(places[d], places[e]) for d, e in zip(order, order[1:] + order[:1], strict=True)]
    i = torch.cat([mine for mine, _ in pairs])
    j = torch.cat([theirs[torch.arange(len(mine)) % len(theirs)] for mine, theirs in pairs])
    return i, j, torch.tensor([len(mine) for mine, _ in pairs])
