"""FACT: A Fourier-based Framework for Domain Generalization (Xu, Zhang, Zhang, Wang, Tian; CVPR 2021).

Amplitude mixup (x̂, `agfa algorithms ampmixup`) and a teacher, whose opinion of either image is learnt on the other:

    min_θ  E [ CE(f_θ(x), y) + CE(f_θ(x̂), y) ] / 2  +  β·r(t)·E [ KL(q(x) ‖ p(x̂)) + KL(q(x̂) ‖ p(x)) ],
    p = softmax(f_θ/T),  q = softmax(f_τ/T), a constant,
    r(t) = exp(-5·(1 - min(t/t_w, 1))²),  t_w = `warmup` · steps,
    τ <- m·τ + (1-m)·θ after step t = 0, 1, ...,  m = min(`momentum`, 1 - 1/(t+2)).

θ predicts, is averaged and is shipped: it is the one that the authors' code evaluates, selects and saves, so their
published figures are the student's. The teacher τ has parameters alone averaged, as there; it sees the images in
training mode as θ does, so its batch-norm statistics, where they are not frozen, are its own. With α = 0 and β = 0
this is ERM.

The authors' r goes up by epochs, for 5 of 50, as here by steps; their rates, for plain gradient descent, are not
taken over.
"""

from __future__ import annotations

import copy
import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from agfa.algorithms import ampmixup
from agfa.algorithms.ampmixup import AmpMixup
from agfa.algorithms.base import Backward, Problem, descend, detached
from agfa.algorithms.search import Choice
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone


class Hparams(ampmixup.Hparams, frozen=True):
    """The values of the authors' code, for PACS; the search adds the paper's for OfficeHome."""

    consistency: Annotated[float, Choice((2.0, 200.0))] = Field(
        2.0, ge=0, description="weight β of agreement with the teacher; 0: amplitude mixup alone"
    )
    temperature: float = Field(10.0, gt=0, description="T, by which logits are divided before they are compared")
    momentum: float = Field(0.9995, ge=0, le=1, description="share of itself that the teacher keeps at each step")
    warmup: float = Field(0.1, ge=0, le=1, description="share of the training in which β rises to its value")


class FACT(AmpMixup):
    """Amplitude mixup, and agreement across it with a slower copy of the network."""

    name = "fact"
    title = "amplitude mixup, and a slower copy of the network to agree with on either image about the other"
    hparams_type = Hparams

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam, then the teacher's."""
        both = torch.cat([batch.images, self.mixed(batch.images)])
        logits, opinions = self.network(both), self.teacher(both)
        nll = F.cross_entropy(logits, batch.labels.repeat(2))
        swapped = opinions.roll(len(batch.images), 0)  # of x̂ for x, of x for x̂
        consistency = 2 * F.kl_div(
            self.softened(logits), self.softened(swapped), reduction="batchmean", log_target=True
        )
        descend(nll + self.weight() * consistency, backward, self.optimizers["model"])
        self.follow()
        return detached(nll=nll, consistency=consistency)

    def softened(self, logits: Tensor) -> Tensor:
        """log softmax(f/T), in full precision."""
        full = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (full / self.hparams.temperature).log_softmax(1)

    def weight(self) -> float:
        """β·r(t)."""
        length = self.hparams.warmup * self.problem.steps
        missing = max(0.0, 1 - self.step / length) if length else 0.0
        return self.hparams.consistency * math.exp(-5 * missing**2)

    @torch.no_grad()
    def follow(self) -> None:
        """The teacher's step: towards the network as it is now."""
        momentum = min(self.hparams.momentum, 1 - 1 / (self.step + 2))
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.network.parameters()), 1 - momentum)
