"""Out-of-distribution generalization via risk extrapolation (Krueger, Caballero, Jacobsen, Zhang, Binas, Zhang,
Le Priol, Courville; ICML 2021), in its form V-REx.

Risks R_d that are equal on the domains seen should stay so on others:

    min_θ  R + β·Var(R_1, ..., R_D),    Var the mean of (R_d - mean R)²,

where R is ERM's risk. In the first `warmup_steps` steps the weight is no more than 1; then it is β, and Adam starts
anew, because the gradients change their size at once.

Weight, warm-up and restart of Adam are those of DomainBed, which takes the mean of the risks where the paper has
their sum. DomainBed's weight is 1 during the warm-up even where β is less.
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
    """V-REx's hyperparameters, defaults and searches as in DomainBed's settings."""

    penalty_weight: Annotated[float, LogUniform(1e-1, 1e5)] = Field(
        10.0, ge=0, description="β, weight of the variance; 0: ERM"
    )
    warmup_steps: Annotated[int, LogUniform(1, 1e4, whole=True)] = Field(
        500, ge=0, description="steps in which the penalty weighs no more than 1"
    )


class VREx(Algorithm):
    """Risk extrapolation by the variance of risks."""

    name = "vrex"
    title = "a penalty on the variance of the domains' risks"
    paper = "Krueger et al. 2021"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the risk and the variance of risks."""
        weight, warmup = self.hparams.penalty_weight, self.hparams.warmup_steps
        losses = F.cross_entropy(self.network(batch.images), batch.labels, reduction="none")
        nll = losses.mean()
        risks = torch.stack([domain.mean() for domain in losses.split_with_sizes(batch.sizes)])
        penalty = risks.var(correction=0)
        if self.step == warmup:
            self.optimizers["model"].state.clear()
        loss = nll + (weight if self.step >= warmup else min(weight, 1.0)) * penalty
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=nll, penalty=penalty)
