"""Distributionally robust neural networks for group shifts (Sagawa, Koh, Hashimoto, Liang; ICLR 2020).

The risk of the worst domain, R_d, by two players, as in the paper's Algorithm 1:

    max_q  Σ_d q_d·R_d(θ)    q over domains, by exponentiated gradient: q_d <- q_d·exp(η·R_d), divided by their sum
    min_θ  Σ_d q_d·R_d(θ)    at the new q

Every step sees every domain, as in DomainBed (the paper samples one at a time). q = softmax(v), and the step of q
is one of plain gradient ascent v_d <- v_d + η·R_d: so written, it goes through `backward`, and several processes
have the same q. With η = 0 the domains weigh the same: ERM, where they show as many images.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim import SGD

from agfa.algorithms.base import Algorithm, Backward, Problem, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import LogUniform
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone


class Hparams(BaseHparams, frozen=True):
    """GroupDRO's hyperparameters, default and search as in DomainBed's settings."""

    eta: Annotated[float, LogUniform(1e-3, 1e-1)] = Field(
        0.01, ge=0, description="rate at which the weights follow the domains' risks; 0: they stay equal"
    )


class GroupDRO(Algorithm):
    """Group distributionally robust optimisation."""

    name = "groupdro"
    title = "domains weighted by how badly they have gone so far"
    paper = "Sagawa et al. 2020"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        self.log_weights = nn.Parameter(torch.zeros(problem.n_domains))
        self.optimizers["weights"] = SGD([self.log_weights], lr=hparams.eta, fused=True)

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """A step of the weights, and one of Adam on the risks that they weigh."""
        losses = F.cross_entropy(self.network(batch.images), batch.labels, reduction="none")
        risks = torch.stack([domain.mean() for domain in losses.split_with_sizes(batch.sizes)])
        descend(-(self.log_weights * risks.detach()).sum(), backward, self.optimizers["weights"])
        q = self.log_weights.detach().softmax(0)
        loss = (q * risks).sum()
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=losses.mean(), weighted=loss, largest_weight=q.max())
