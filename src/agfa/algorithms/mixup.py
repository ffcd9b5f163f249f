"""Mixup: beyond empirical risk minimization (Zhang, Cisse, Dauphin, Lopez-Paz; ICLR 2018).

Pairs of images from one minibatch, whatever their domains, are mixed, and so are their labels:

    x~ = λ·x_i + (1-λ)·x_j,    y~ = λ·y_i + (1-λ)·y_j,    λ ~ Beta(α, α)
    min_θ  E [ CE(f_θ(x~), y~) ] = E [ λ·CE(f_θ(x~), y_i) + (1-λ)·CE(f_θ(x~), y_j) ]

One λ and one permutation j of the minibatch a step, as in the authors' code. In the MNIST tables, "Mixup" is
`imixup`.
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
    """Mixup's hyperparameters: default as in SWAD's settings, search as in DomainBed's for inter-domain mixup."""

    alpha: Annotated[float, LogUniform(0.1, 10)] = Field(0.2, ge=0, description="of Beta(α, α); 0: nothing is mixed")


class Mixup(Algorithm):
    """Mixup within a minibatch."""

    name = "mixup"
    title = "cross-entropy on mixtures of two images and of their labels"
    paper = "Zhang et al. 2018"
    hparams_type = Hparams

    hparams: Hparams

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the mixed minibatch."""
        x, y, *_ = batch
        j = torch.randperm(len(x)).to(x.device, non_blocking=True)
        share = beta(self.hparams.alpha, 1).to(x)
        logits = self.network(mix(x, x[j], share))
        loss = mixed_cross_entropy(logits, y, y[j], share)
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss)
