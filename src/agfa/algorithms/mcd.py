"""MCD: Maximum Classifier Discrepancy for Unsupervised Domain Adaptation (Saito, Watanabe, Ushiku, Harada; CVPR
2018), among the sources.

What AGFA grows from: two classifiers h, h' on the same features, which agree on what they have learnt and are made to
differ on a domain whose labels they do not see; the features learn to leave them no room to. There is no target here,
so the sources take turns at playing it: source t = step mod D is T, without its labels, and the others are S.

    A   min_θ,h,h'  L(θ, h; S) + L(θ, h'; S)                    L: cross-entropy
    B   min_h,h'    L(θ, h; S) + L(θ, h'; S) - d(θ, h, h'; T)
    C   min_θ       d(θ, h, h'; T),  `inner_steps` times        d = E_T mean_c |softmax(h(z))_c - softmax(h'(z))_c|

one after the other, each at the parameters that the one before left. Set beside `agfa`, it says what a posterior in
place of two adversarial classifiers is good for: so both are linear as AGFA's is (the paper's have hidden layers).
They predict together, by the mean of their logits, the authors' ensemble.

A step passes the images of S twice (once without gradients), and those of T 1 + `inner_steps` times. No setting makes
this ERM: there are always two classifiers, and a source whose labels are not used.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from agfa.algorithms.base import Algorithm, Backward, Network, Problem, adam, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import Choice
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone


class Hparams(BaseHparams, frozen=True):
    """The default of the authors' code; the search is over the values that the paper reports."""

    inner_steps: Annotated[int, Choice((2, 3, 4))] = Field(
        4, ge=1, description="steps of the features, in each step, against the classifiers' discrepancy"
    )


class Pair(nn.Module):
    """Two linear classifiers; called, they predict together."""

    def __init__(self, n_features: int, n_classes: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(n_features, n_classes), nn.Linear(n_features, n_classes)

    def forward(self, features: Tensor) -> Tensor:
        """The mean of both logits."""
        one, other = self.both(features)
        return (one + other) / 2

    def both(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of each, in full precision under autocast too: their small differences are what counts."""
        with torch.autocast(features.device.type, enabled=False):
            return self.one(features), self.other(features)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """The sum of both cross-entropies."""
        one, other = self.both(features)
        return F.cross_entropy(one, labels) + F.cross_entropy(other, labels)

    def discrepancy(self, features: Tensor) -> Tensor:
        """d."""
        one, other = self.both(features)
        return (one.softmax(1) - other.softmax(1)).abs().mean()


class MCD(Algorithm):
    """Maximum classifier discrepancy, each source in turn as the target."""

    name = "mcd"
    title = "features on which two classifiers that want to differ cannot, on a source that they have no labels of"
    paper = "Saito et al. 2018"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        self.optimizers = {
            "features": adam((backbone.parameters(), hparams.lr), weight_decay=hparams.weight_decay),
            "classifiers": adam((self.pair.parameters(), hparams.lr), weight_decay=hparams.weight_decay),
        }

    @classmethod
    def make_network(cls, backbone: Backbone, problem: Problem, hparams: Hparams) -> Network:
        """The backbone with two heads."""
        return Network(backbone, Pair(backbone.n_features, problem.n_classes))

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """Steps A, B and C."""
        features, classifiers = self.optimizers["features"], self.optimizers["classifiers"]
        phi, pair, sources = self.network.features, self.pair, batch.by_domain()
        x_t, _ = sources.pop(self.step % len(sources))
        x_s, y_s = (torch.cat(part) for part in zip(*sources, strict=True))

        nll = pair.loss(phi(x_s), y_s)
        descend(nll, backward, features, classifiers)

        with torch.no_grad():
            z_s, z_t = phi(torch.cat([x_s, x_t])).split_with_sizes((len(x_s), len(x_t)))
        descend(pair.loss(z_s, y_s) - pair.discrepancy(z_t), backward, classifiers)

        for _ in range(self.hparams.inner_steps):
            discrepancy = pair.discrepancy(phi(x_t))
            descend(discrepancy, backward, features)
        return detached(nll=nll / 2, discrepancy=discrepancy)

    @property
    def pair(self) -> Pair:
        """The two classifiers."""
        head = self.network.head
        assert isinstance(head, Pair)
        return head
