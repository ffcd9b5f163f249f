"""DANN: Domain-Adversarial Training of Neural Networks (Ganin, Ustinova, Ajakan, Germain, Larochelle, Laviolette,
Marchand, Lempitsky; JMLR 2016), among the sources.

A discriminator D_ψ tells from its features which source d an image is of, and the features learn not to say:

    min_ψ    L_d(θ, ψ) = E[-log softmax(D_ψ(phi_θ(x)))_d] + g·E[|∇ -log softmax(D_ψ(phi_θ(x)))_d|²]
    min_θ,W  E[-log softmax(W·phi_θ(x) + b)_y] - λ·L_d(θ, ψ),                            ∇ along the features.

As in DomainBed the players take turns, `discriminator_steps` of the discriminator after each one of the model, where
the paper reverses the gradient in one joint step; and the penalty g is an addition of DomainBed's. So the model takes
1 step in 1 + `discriminator_steps`.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from agfa.algorithms.base import Algorithm, Backward, Problem, adam, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import Choice, LogUniform
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone
from agfa.nn.mlp import mlp


class Hparams(BaseHparams, frozen=True):
    """Defaults and search as DomainBed published them; its lr_g is `lr`, its lr_d by default the same."""

    strength: Annotated[float, LogUniform(1e-2, 1e2)] = Field(1.0, ge=0, description="weight λ of the adversary")
    discriminator_lr: Annotated[float | None, LogUniform(1e-5, 10**-3.5)] = Field(
        None, gt=0, description="learning rate of the discriminator (none: lr)"
    )
    discriminator_weight_decay: Annotated[float, LogUniform(1e-6, 1e-2)] = Field(
        0.0, ge=0, description="weight decay of the discriminator"
    )
    discriminator_steps: Annotated[int, LogUniform(1, 8, whole=True)] = Field(
        1, ge=1, description="steps of the discriminator after each of the model"
    )
    gradient_penalty: Annotated[float, LogUniform(1e-2, 1e1)] = Field(
        0.0, ge=0, description="weight g of the discriminator's squared gradient"
    )
    beta1: Annotated[float, Choice((0.0, 0.5))] = Field(0.5, ge=0, lt=1, description="first moment of both Adams")
    width: Annotated[int, LogUniform(64, 1024, whole=True)] = Field(256, ge=1, description="discriminator's units")
    depth: Annotated[int, Choice((3, 4, 5))] = Field(3, ge=1, description="discriminator's linear layers")
    dropout: Annotated[float, Choice((0.0, 0.1, 0.5))] = Field(0.0, ge=0, lt=1, description="in the discriminator")


class DANN(Algorithm):
    """Domain-adversarial features."""

    name = "dann"
    title = "features from which a discriminator cannot tell the source"
    paper = "Ganin et al. 2016"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        self.discriminator = self.make_discriminator(backbone.n_features)
        rate, betas = hparams.discriminator_lr or hparams.lr, (hparams.beta1, 0.9)
        model, players = self.network.parameters(), self.discriminator.parameters()
        self.optimizers = {
            "model": adam((model, hparams.lr), weight_decay=hparams.weight_decay, betas=betas),
            "discriminator": adam((players, rate), weight_decay=hparams.discriminator_weight_decay, betas=betas),
        }

    def make_discriminator(self, n_features: int) -> nn.Module:
        """D."""
        h = self.hparams
        return mlp(n_features, self.problem.n_domains, h.width, h.depth, h.dropout)

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """A step of the model, or one of the discriminator."""
        x, y, d, _ = batch
        k = self.hparams.discriminator_steps
        models_turn = (self.step + 1) % (k + 1) >= k
        with torch.set_grad_enabled(models_turn):
            features = self.network.features(x)
            nll = F.cross_entropy(self.network.head(features), y)
        confusion = self.discriminator_loss(features.requires_grad_(), y, d)
        if models_turn:
            descend(nll - self.hparams.strength * confusion, backward, self.optimizers["model"])
        else:
            descend(confusion, backward, self.optimizers["discriminator"])
        return detached(nll=nll, discriminator=confusion)

    def discriminator_loss(self, features: Tensor, labels: Tensor, domains: Tensor) -> Tensor:
        """L_d: how badly the discriminator tells the sources, and its penalty."""
        losses = F.cross_entropy(self.discriminate(features, labels), domains, reduction="none")
        loss = (losses / self.divisors(labels)).sum()
        if self.hparams.gradient_penalty:
            (gradient,) = torch.autograd.grad(losses.sum(), features, create_graph=True)
            loss = loss + self.hparams.gradient_penalty * gradient.square().sum(1).mean()
        return loss

    def discriminate(self, features: Tensor, labels: Tensor) -> Tensor:
        """The logits of D, which does not see the classes here."""
        return self.discriminator(features)  # type: ignore[no-any-return]  # nn.Module's call is Any

    def divisors(self, labels: Tensor) -> Tensor | int:
        """By what to divide each image's loss, so that all count the same."""
        return len(labels)
