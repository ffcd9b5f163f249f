"""MASF: Domain Generalization via Model-Agnostic Learning of Semantic Features (Dou, Castro, Kamnitsas, Glocker;
NeurIPS 2019).

In every step some sources play the unseen ones. With the cross-entropy F on the meta-train sources, its plain
gradient step θ' = θ - α·∇F(θ) (each tensor's gradient clipped to a norm of 2), and all sources seen at θ':

    min_θ  F(θ) + β1·L_global(θ') + β2·L_local(θ', φ)        min_φ  L_local(θ', φ)

    L_global = mean over pairs (meta-train i, meta-test j) of  1/C Σ_c ½·[KL(s_ic | s_jc) + KL(s_jc | s_ic)],
               s_ic = softmax(mean logits of class c in source i / τ),  for the classes c that both sources show
    L_local  = mean over pairs (a, p) of one class of  max(0, d_ap - d_an + ξ),    d = |e_φ - e_φ|²,
               n the nearest image of another class that is farther than p, the farthest one where none is

e_φ are embeddings of the features by two linear layers of 1024 and 256 units, each with a leaky ReLU.

**First order**, as in the authors' code: θ' - θ is a constant in the gradient. The code takes two steps of two Adams,
of F and of the rest (clipped); here it is one step of the sum, as in the paper's algorithm. L_local is over all
images of the minibatch, in the code over a third. At β1 = β2 = 0 it is ERM on the meta-train sources.
"""

from __future__ import annotations

from itertools import product
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from agfa.algorithms.base import Algorithm, Backward, Problem, adam, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import LogUniform
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone

CLIP = 2.0  # the largest norm of a tensor's gradient in the inner step
WIDTHS = (1024, 256)  # of the embedding's layers
SLOPE = 0.2  # of its leaky ReLUs


class Hparams(BaseHparams, frozen=True):
    """Defaults as in the paper for PACS; it publishes no search: that of the weights is ours, a decade either way."""

    alignment: Annotated[float, LogUniform(1e-1, 1e1)] = Field(1.0, ge=0, description="weight β1 of L_global")
    clustering: Annotated[float, LogUniform(5e-4, 5e-2)] = Field(0.005, ge=0, description="weight β2 of L_local")
    inner_lr: float | None = Field(None, gt=0, description="step size α of the inner step (none: lr)")
    metric_lr: float | None = Field(None, gt=0, description="learning rate of the embedding (none: lr)")
    margin: float = Field(10.0, ge=0, description="margin ξ of the triplets")
    temperature: float = Field(2.0, gt=0, description="temperature τ of the soft confusions")
    meta_test: int = Field(1, ge=1, description="sources that play the unseen ones")


class MASF(Algorithm):
    """Model-agnostic learning of semantic features, first order."""

    name = "masf"
    title = "steps on some sources after which all show classes alike, and clustered"
    paper = "Dou et al. 2019"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        hidden, out = WIDTHS
        self.embedding = nn.Sequential(
            nn.Linear(backbone.n_features, hidden),
            nn.LeakyReLU(SLOPE),
            nn.Linear(hidden, out),
            nn.LeakyReLU(SLOPE),
        )
        self.optimizers["metric"] = adam((self.embedding.parameters(), hparams.metric_lr or hparams.lr))

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on F(θ) + β1·L_global(θ') + β2·L_local(θ', φ)."""
        h, sources = self.hparams, batch.by_domain()
        order = torch.randperm(len(sources)).tolist()
        n_train = max(1, len(sources) - h.meta_test)
        train, test = order[:n_train], order[n_train:]

        theta = dict(self.network.named_parameters())
        x, y = (torch.cat(parts) for parts in zip(*(sources[i] for i in train), strict=True))
        task = F.cross_entropy(self.network(x), y)
        grads = torch.autograd.grad(task, list(theta.values()), allow_unused=True, materialize_grads=True)
        virtual = {name: p + self.inner_step(g) for (name, p), g in zip(theta.items(), grads, strict=True)}

        features, logits = self.outputs_at(virtual, batch.images)
        confusions = [
            soft_confusion(f, labels, h.temperature)
            for f, (_, labels) in zip(logits.split_with_sizes(batch.sizes), sources, strict=True)
        ]
        alignment = torch.stack([divergence(confusions[i], confusions[j]) for i, j in product(train, test)]).mean()
        embedded = self.embedding(features).to(features.dtype)
        clustering = semi_hard_triplets(embedded, batch.labels, h.margin)

        # g·θ has the gradient of F, and needs no second pass back through it
        linear = torch.stack([(p * g).sum() for p, g in zip(theta.values(), grads, strict=True)]).sum()
        loss = linear + h.alignment * alignment + h.clustering * clustering
        descend(loss, backward, self.optimizers["model"], self.optimizers["metric"])
        return detached(nll=task, alignment=alignment, clustering=clustering)

    def inner_step(self, gradient: Tensor) -> Tensor:
        """θ' - θ, of plain gradient descent."""
        shrunk: Tensor = (CLIP / gradient.norm()).clamp(max=1)
        return -(self.hparams.inner_lr or self.hparams.lr) * shrunk * gradient

    def outputs_at(self, parameters: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits of the network with these parameters in place of its own."""
        of_part: dict[str, dict[str, Tensor]] = {"backbone": {}, "head": {}}
        for name, value in parameters.items():
            part, _, rest = name.partition(".")
            of_part[part][rest] = value
        features: Tensor = functional_call(self.network.backbone, of_part["backbone"], (x,))
        logits: Tensor = functional_call(self.network.head, of_part["head"], (features,))
        return features, logits.to(features.dtype)


def soft_confusion(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log s, a row for each class, and which classes there are."""
    members = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    count = members.sum(0)
    with torch.autocast(logits.device.type, enabled=False):
        means = members.T @ logits / count.clamp(min=1).unsqueeze(1)
    return (means / temperature).log_softmax(1), count > 0


def divergence(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """1/C Σ_c ½·[KL(s | s') + KL(s' | s)], in which ½·Σ (s - s')·(log s - log s') is both halves at once."""
    (log_s, present), (log_t, also) = one, other
    of_class = 0.5 * ((log_s.exp() - log_t.exp()) * (log_s - log_t)).sum(1)
    return (of_class * (present & also)).mean()


def semi_hard_triplets(embeddings: Tensor, labels: Tensor, margin: float) -> Tensor:
    """The mean over ordered pairs of one class, 0 where there are none or no other class."""
    distance = (embeddings.unsqueeze(1) - embeddings).square().sum(2)
    same = labels.unsqueeze(1) == labels
    farther = ~same.unsqueeze(1) & (distance.unsqueeze(1) > distance.unsqueeze(2))  # anchor, positive, negative
    nearest = distance.unsqueeze(1).where(farther, torch.inf).amin(2)
    farthest = distance.where(~same, -torch.inf).amax(1, keepdim=True)
    negative = nearest.where(farther.any(2), farthest)
    pairs = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device) & (~same).any(1, keepdim=True)
    hinges = (distance - negative + margin).relu().where(pairs, 0.0)
    return hinges.sum() / pairs.sum().clamp(min=1)
