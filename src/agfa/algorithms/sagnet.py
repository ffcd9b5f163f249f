"""SagNet: Reducing Domain Gap by Reducing Style Bias (Nam, Lee, Park, Yoon, Yoo; CVPR 2021).

With z = f(x) the feature maps after a stage, and μ, σ² the mean and variance of each of their channels,

    style randomised     SR(z) = s·(z - μ)/σ + m,    m, s² = a·(μ, σ²) + (1 - a)·(μ', σ²'),    a ~ Uniform(0, 1),
    content randomised   CR(z) = σ·(z' - μ')/σ' + μ,                      z' the maps of another image of the batch.

The content network c (the rest of the backbone, and the head) learns from SR, and predicts. A style network s (a copy
of that rest, with its own head) learns from CR, and f learns to give it no style to tell the class from:

    min_f,c  E[-log softmax(c(SR(f(x))))_y]
    min_s    E[-log softmax(s(CR(f(x))))_y]
    min_f    λ·E[-mean over classes of log softmax(s(CR(f(x))))],                       one step each, in this order.

`stage: 2`, the default, is where the authors' code randomises (their stage 3, the stem being the first). `stage: 5`
takes the feature vector for z, with one mean and variance a vector and linear networks c and s: DomainBed's form,
which works on any backbone and which the published tables are of. It is not the default because a vector has no
channels, and so no style in the paper's sense. The adversary moves all of f, as in DomainBed; the authors' code moves
only the scales and shifts of f's batch-norm layers, which not every backbone has. At λ = 0 the adversary is left out,
but styles are still randomised, so it is not ERM.
"""

from __future__ import annotations

import copy
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
from agfa.nn.stages import FEATURES, onward, stages, upto

EPS = 1e-5  # added to variances


class Hparams(BaseHparams, frozen=True):
    """Strength and its search as DomainBed and SWAD published them; the stage as in the authors' code."""

    strength: Annotated[float, LogUniform(1e-2, 1e1)] = Field(0.1, ge=0, description="weight λ of the adversary")
    stage: int = Field(2, ge=1, le=5, description="after which stage styles are randomised; 5: the feature vector")


class SagNet(Algorithm):
    """Style-agnostic networks."""

    name = "sagnet"
    title = "styles of feature maps randomised, and features that say no class by their style"
    paper = "Nam et al. 2021"
    hparams_type = Hparams

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        self.style_head = nn.Linear(backbone.n_features, problem.n_classes)
        self.style_backbone: nn.Module = nn.Identity()
        if hparams.stage != FEATURES:
            stages(backbone)  # an error now, and not at the first step
            self.style_backbone = copy.deepcopy(backbone)  # of which the stages that follow are used
        style = [*self.style_backbone.parameters(), *self.style_head.parameters()]
        players = {"features": backbone.parameters(), "content": self.network.head.parameters(), "style": style}
        self.optimizers = {
            name: adam((parameters, hparams.lr), weight_decay=hparams.weight_decay)
            for name, parameters in players.items()
        }

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """A step of the content network, one of the style network, one against it."""
        x, y, *_ = batch
        backbone, stage, optimizers = self.network.backbone, self.hparams.stage, self.optimizers

        maps = randomise_style(upto(backbone, stage, x))
        content = F.cross_entropy(self.network.head(onward(backbone, stage, maps, x)), y)
        descend(content, backward, optimizers["features"], optimizers["content"])

        maps = upto(backbone, stage, x)
        style = F.cross_entropy(self.style_logits(randomise_content(maps.detach()), x), y)
        descend(style, backward, optimizers["style"])

        adversary = -self.style_logits(randomise_content(maps), x).log_softmax(1).mean()
        if self.hparams.strength:
            descend(self.hparams.strength * adversary, backward, optimizers["features"])
        return detached(nll=content, style=style, adversary=adversary)

    def style_logits(self, maps: Tensor, x: Tensor) -> Tensor:
        """s, what the style network says of maps, in full precision."""
        features = maps
        if isinstance(self.style_backbone, Backbone):
            features = onward(self.style_backbone, self.hparams.stage, maps, x)
        return self.style_head(features).to(maps.dtype)  # type: ignore[no-any-return]  # nn.Module's call is Any


def randomise_style(z: Tensor) -> Tensor:
    """SR: each image's content, in a style between its own and another's; maps (n, C, H, W) or vectors (n, d)."""
    content, mean, variance = _separate(z)
    share = torch.rand(len(z), *[1] * (mean.ndim - 1), device=z.device)
    other = torch.randperm(len(z), device=z.device)
    mean = share * mean + (1 - share) * mean[other]
    variance = share * variance + (1 - share) * variance[other]
    return (content * (variance + EPS).sqrt() + mean).view_as(z)


def randomise_content(z: Tensor) -> Tensor:
    """CR: another image's content, as a constant, in each image's style."""
    content, mean, variance = _separate(z)
    other = torch.randperm(len(z), device=z.device)
    return (content[other].detach() * (variance + EPS).sqrt() + mean).view_as(z)


def _separate(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The content (z - μ)/σ, μ and σ² of each channel, or of each vector; places flattened."""
    z = z.flatten(2) if z.ndim == 4 else z
    variance, mean = torch.var_mean(z, dim=-1, keepdim=True, correction=min(1, z.shape[-1] - 1))
    return (z - mean) / (variance + EPS).sqrt(), mean, variance
