"""ER: Domain Generalization via Entropy Regularization (Zhao, Gong, Liu, Fu, Tao; NeurIPS 2020).

Features z = phi_θ(x) should have the same distribution in every source, given the class too. Beside DANN's
discriminator D of the sources there are, for each source i, two classifiers of its own, T_i and T'_i:

    min_T_i   L(T_i; i)                                    learns the classes of source i, from constant features
    min_θ,h   L(h)  -  λ_D·L_D(D)                          h: the head; what tells the sources is unlearnt (DANN)
                    +  λ_T·mean_i L(T_i; all but i)        T_i must be right about the other sources too
                    -  λ_H·mean_i L(T'_i; i)               the entropy of the class given features, H(Y|phi(X)) in
    min_D,T'  L_D(D),  mean_i L(T'_i; i)                   source i, is raised: min over T'_i of L(T'_i; i) is it

L(h) is ERM's cross-entropy. L(T; S) is that of the images of sources S in which all their classes count the same,
and L_D that of the sources in which all sources do. T_i takes its step first; then all others take theirs together,
from one pass, gradients reversed on their way to the features. With λ_D = λ_T = λ_H = 0 it is ERM.

The networks D, T, T' and the weights λ are those of the authors' code. It draws the networks' initial weights ten
times smaller. Its learning rates, for plain gradient descent, are not taken over (D's is that of the features, those
of T and T' a tenth of it), nor is its warm-up, ten epochs of losses times 0.01, which Adam would not notice. Its L_D
weighs sources by the inverse of their numbers of images although it shows as many of each; here they count the same.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from agfa.algorithms.base import Algorithm, Backward, Problem, adam, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import LogUniform
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone
from agfa.nn.generators import reverse_gradient


class Hparams(BaseHparams, frozen=True):
    """Weights as in the authors' code, which has no search; the players' rate as DomainBed's of a discriminator."""

    adversary: float = Field(0.1, ge=0, description="weight λ_D of the discriminator that is fought")
    agreement: float = Field(0.05, ge=0, description="weight λ_T of other sources' classifiers")
    entropy: float = Field(0.001, ge=0, description="weight λ_H of the entropy of the class given the features")
    players_lr: Annotated[float | None, LogUniform(1e-5, 10**-3.5)] = Field(
        None, gt=0, description="learning rate of D, T and T' (none: lr)"
    )


class ER(Algorithm):
    """Entropy regularisation."""

    name = "er"
    title = "features that hide the source, and whose classes the classifiers of other sources find"
    paper = "Zhao et al. 2020"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        n, c, d = backbone.n_features, problem.n_classes, problem.n_domains
        self.discriminator = player(n, d)
        self.classifiers = nn.ModuleList(player(n, c) for _ in range(d))  # T
        self.adversaries = nn.ModuleList(player(n, c) for _ in range(d))  # T'
        rate = hparams.players_lr or hparams.lr
        self.optimizers |= {
            "classifiers": adam((self.classifiers.parameters(), rate)),
            "adversaries": adam((nn.ModuleList([self.discriminator, self.adversaries]).parameters(), rate)),
        }

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """A step of the T_i, then one of all others."""
        h, model, adversaries = self.hparams, self.optimizers["model"], self.optimizers["adversaries"]
        z = self.network.features(batch.images)
        own = self.mean_loss(self.classifiers, z.detach(), batch, others=False)
        descend(own, backward, self.optimizers["classifiers"])

        nll = F.cross_entropy(self.network.head(z), batch.labels)
        told = balanced(self.discriminator(reverse_gradient(z, h.adversary)), batch.domains)
        agreement = self.mean_loss(self.classifiers, z, batch, others=True)
        entropy = self.mean_loss(self.adversaries, reverse_gradient(z, h.entropy), batch, others=False)
        descend(nll + told + h.agreement * agreement + entropy, backward, model, adversaries)
        return detached(nll=nll, discriminator=told, own=own, agreement=agreement, entropy=entropy)

    def mean_loss(self, players: nn.ModuleList, z: Tensor, batch: Batch, others: bool) -> Tensor:
        """mean_i L(T_i; i), or L(T_i; all but i)."""
        parts = list(zip(z.split_with_sizes(batch.sizes), batch.labels.split_with_sizes(batch.sizes), strict=True))
        losses = []
        for i, classify in enumerate(players):
            seen = parts[:i] + parts[i + 1 :] if others else [parts[i]]
            features, labels = (torch.cat(part) for part in zip(*seen, strict=True))
            losses.append(balanced(classify(features), labels))
        return torch.stack(losses).mean()


def player(n_in: int, n_out: int) -> nn.Sequential:
    """D, T_i or T'_i, of the sizes of the authors' code."""
    layers = (nn.Linear(n_in, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, n_out))
    return nn.Sequential(*layers)


def balanced(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in which all targets that there are count the same."""
    counts = F.one_hot(targets, logits.shape[1]).sum(0).clamp(min=1)
    weight = 1 / counts.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, weight)
