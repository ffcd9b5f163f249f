"""MetaReg: Towards Domain Generalization using Meta-Regularization (Balaji, Sankaranarayanan, Chellappa; NeurIPS
2018).

A regulariser of the classifier, R_φ(W) = Σ_k φ_k·|W_k| over its weights and biases, is learnt so that a classifier
trained with it on one source does well on another. F_d is the cross-entropy on source d, θ_d a head of its own.

Phase 1, the first `learning` share of the steps (the paper's Algorithm 1):

    min_ψ,θ   mean_d F_d(ψ, θ_d)                                    one step
    min_φ     F_b(ψ, β_l),   β_0 = θ_a,   β_k+1 = β_k - α·∇[F_a(ψ, β_k) + R_φ(β_k)]        for random sources a ≠ b

and the classifier that predicts learns on these features: min_W F(ψ, W) + s·R_φ(W). Phase 2 is the paper's last one:
φ stays as it is, and min_ψ,W F(ψ, W) + s·R_φ(W) over all sources.

**Second order**, as in the paper: the gradient of φ goes through all l inner steps; these are of a head alone, and a
step costs what ERM's does. In the paper the network of phase 2 begins anew. Here it goes on, because the model of a
training is validated, averaged and chosen all along, and a second start would be the end of that. Both steps of
phase 1 take the features from before the first, and a's and b's images of the same minibatch; Adam moves all but β.
At s = 0 there is nothing to learn a regulariser for, and it is ERM from the first step.
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


class Hparams(BaseHparams, frozen=True):
    """Defaults and search are ours: there is no public code, and the paper's s is 1."""

    strength: Annotated[float, LogUniform(1e-1, 1e1)] = Field(1.0, ge=0, description="weight s of the regulariser")
    learning: float = Field(0.5, ge=0, le=1, description="share of the steps in which the regulariser is learnt")
    inner_steps: int = Field(5, ge=1, description="inner steps l")
    inner_lr: float = Field(0.01, gt=0, description="step size α of the inner steps")
    meta_lr: float | None = Field(None, gt=0, description="learning rate of φ (none: lr / 10)")


class MetaReg(Algorithm):
    """A regulariser of the classifier, learnt between sources."""

    name = "metareg"
    title = "a weighted L1 norm of the classifier, learnt so that what one source teaches holds on another"
    paper = "Balaji et al. 2018"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        heads = [matrix(nn.Linear(backbone.n_features, problem.n_classes)) for _ in range(problem.n_domains)]
        self.heads = nn.Parameter(torch.stack(heads).detach())  # θ, one (C, d + 1) a source
        self.weights = nn.Parameter(torch.zeros_like(heads[0]))  # φ
        self.optimizers["heads"] = adam(([self.heads], hparams.lr), weight_decay=hparams.weight_decay)
        self.optimizers["regulariser"] = adam(([self.weights], hparams.meta_lr or hparams.lr / 10))

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the regularised cross-entropy; in phase 1 also of the sources' heads, and of φ."""
        h, model = self.hparams, self.optimizers["model"]
        learning = h.strength > 0 and self.step < h.learning * self.problem.steps
        features = self.network.features(batch.images)
        logits = self.network.head(features.detach() if learning else features)
        nll = F.cross_entropy(logits, batch.labels)
        penalty = self.regulariser(matrix(self.network.head))
        loss = nll + h.strength * penalty
        if not learning:
            descend(loss, backward, model)
            return detached(nll=nll, penalty=penalty)

        sizes = batch.sizes
        each = list(zip(features.split_with_sizes(sizes), batch.labels.split_with_sizes(sizes), strict=True))
        of_heads = torch.stack([head_loss(head, *of) for head, of in zip(self.heads, each, strict=True)]).mean()
        descend(loss + of_heads, backward, model, self.optimizers["heads"])

        a, b = torch.randperm(len(each))[:2].tolist()
        trained = self.train_head(self.heads[a].detach(), each[a][0].detach(), each[a][1])
        meta_test = head_loss(trained, each[b][0].detach(), each[b][1])
        descend(meta_test, backward, self.optimizers["regulariser"])
        return detached(nll=nll, penalty=penalty, heads=of_heads, meta_test=meta_test)

    def regulariser(self, head: Tensor) -> Tensor:
        """R_φ."""
        return (self.weights * head.abs()).sum()

    def train_head(self, head: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """β_l, a function of φ."""
        for _ in range(self.hparams.inner_steps):
            head.requires_grad_()
            loss = head_loss(head, features, labels) + self.regulariser(head)
            (gradient,) = torch.autograd.grad(loss, head, create_graph=True)
            head = head - self.hparams.inner_lr * gradient
        return head


def matrix(head: nn.Module) -> Tensor:
    """The weights and, as one more column, the biases of a linear head."""
    assert isinstance(head, nn.Linear)
    return torch.cat([head.weight, head.bias.unsqueeze(1)], dim=1)


def head_loss(head: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of a head (C, d + 1), in full precision."""
    with torch.autocast(features.device.type, enabled=False):
        return F.cross_entropy(F.linear(features, head[:, :-1], head[:, -1]), labels)
