"""CDANN: Deep Domain Generalization via Conditional Invariant Adversarial Networks (Li, Tian, Gong, Liu, Liu, Zhang,
Tao; ECCV 2018), as DomainBed has it.

DANN whose discriminator is told the class, in which every class counts the same:

    L_d(θ, ψ) = Σ_i w_i·(-log softmax(D_ψ(phi_θ(x_i) + e_(y_i))))_(d_i) + g·(DANN's penalty),
    w_i = 1 / (classes in the batch · images of class y_i in the batch),

so what features say of the source given the class is fought, and not what classes say of it. The class embeddings e
belong to the discriminator's player; turns, λ and the rest are DANN's (`agfa algorithms dann`). The paper has one
discriminator for each class and another for all; DomainBed's one with an embedding is what the published figures are
of. Where a class is absent from a batch, w sums to 1 here, and in DomainBed to less.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from agfa.algorithms.dann import DANN


class CDANN(DANN):
    """Domain-adversarial features, given the class."""

    name = "cdann"
    title = "features from which a discriminator that is told the class cannot tell the source"
    paper = "Li et al. 2018"

    discriminator: nn.ModuleDict

    def make_discriminator(self, n_features: int) -> nn.Module:
        """D, and the embeddings e of the classes."""
        embeddings = nn.Embedding(self.problem.n_classes, n_features)
        return nn.ModuleDict({"classes": embeddings, "domains": super().make_discriminator(n_features)})

    def discriminate(self, features: Tensor, labels: Tensor) -> Tensor:
        """The logits of D, which sees the classes."""
        given = features + self.discriminator["classes"](labels)
        return self.discriminator["domains"](given)  # type: ignore[no-any-return]  # nn.Module's call is Any

    def divisors(self, labels: Tensor) -> Tensor:
        """1/w: by what to divide each image's loss, so that classes count the same."""
        counts = F.one_hot(labels, self.problem.n_classes).sum(0)
        return counts[labels] * (counts > 0).sum()
