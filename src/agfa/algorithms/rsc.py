"""RSC: Self-Challenging Improves Cross-Domain Generalization (Huang, Wang, Xing, Huang; ECCV 2020).

What the classifier h relies on most is taken away from it while it learns. With z = phi_θ(x):

    (1)  g = ∂ h(z)_y / ∂z                                     how much each part of z speaks for the class
    (2)  m = 0 at the `drop` largest parts of g, 1 elsewhere
    (3-4) h(z·m)                                               the muted prediction
         m = 1 throughout, but for the `batch` share of images whose probability of y falls most by it (section 3.3)
    (5)  min_θ,W  E[-log softmax(h(z·m))_y]

`stage: 5`, the default, takes the feature vector for z: equations (1) to (5) as they stand, DomainBed's form, which
the published tables are of. `stage: 4` takes the last feature maps (or those of an earlier stage) and mutes, by a
coin tossed at each step, channels (those with the largest mean of g) or places (where Σ_channels z·mean(g) is
largest): the authors' code. It is not the default because the paper's own rule for places, the mean of g over
channels, says nothing before a mean over places, and their code, which replaced it more than once, has constants and
a schedule that the paper does not give.

A part at the threshold stays (in DomainBed it goes), so that at drop = 0 or batch = 0 it is ERM exactly.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from agfa.algorithms.base import Algorithm, Backward, Problem, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import Uniform
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone
from agfa.nn.stages import FEATURES, onward, stages, upto


class Hparams(BaseHparams, frozen=True):
    """Shares and their search as DomainBed and SWAD published them."""

    drop: Annotated[float, Uniform(0, 0.5)] = Field(
        1 / 3, ge=0, le=1, description="share of each image that is muted"
    )
    batch: Annotated[float, Uniform(0, 0.5)] = Field(1 / 3, ge=0, le=1, description="share of images that are muted")
    stage: int = Field(5, ge=1, le=5, description="after which stage features are muted; 5: the feature vector")


class RSC(Algorithm):
    """Representation self-challenging."""

    name = "rsc"
    title = "features that speak most for the class are muted"
    paper = "Huang et al. 2020"
    hparams_type = Hparams

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        if hparams.stage != FEATURES:
            stages(backbone)  # an error now, and not at the first step

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the cross-entropy of muted predictions."""
        x, y, *_ = batch
        z = upto(self.network.backbone, self.hparams.stage, x)
        loss = F.cross_entropy(self.classify(z * self.mask(z, x, y), x), y)
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss)

    def classify(self, z: Tensor, x: Tensor) -> Tensor:
        """h, from features or maps to logits, in full precision."""
        logits: Tensor = self.network.head(onward(self.network.backbone, self.hparams.stage, z, x))
        return logits.to(z.dtype)

    def mask(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """m, True where z is kept."""
        z, label = z.detach().requires_grad_(), y.unsqueeze(1)
        logits = self.classify(z, x)
        (gradient,) = torch.autograd.grad(logits.gather(1, label).sum(), z)
        kept = ~largest(relevance(z.detach(), gradient), self.hparams.drop)
        with torch.no_grad():
            muted = self.classify(z * kept, x)
            change = logits.softmax(1).gather(1, label) - muted.softmax(1).gather(1, label)
        challenged = largest(change.view(1, -1), self.hparams.batch).view(-1, *[1] * (z.ndim - 1))
        return kept | ~challenged


def relevance(z: Tensor, gradient: Tensor) -> Tensor:
    """How much parts of z speak for the class: its entries; of maps (n, C, H, W) channels or, as often, places."""
    if z.ndim == 2:
        return gradient
    of_channel = gradient.mean(dim=(2, 3), keepdim=True)
    return of_channel if torch.rand(()) < 0.5 else (z * of_channel).sum(1, keepdim=True)


def largest(values: Tensor, share: float) -> Tensor:
    """True at the largest `share` of each row's values."""
    flat = values.flatten(1)
    return (flat > flat.quantile(1 - share, dim=1, keepdim=True)).view_as(values)
