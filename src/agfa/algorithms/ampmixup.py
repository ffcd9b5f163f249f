"""Amp-Mixup: amplitude mixup, FACT without its teacher (Xu, Zhang, Zhang, Wang, Tian; CVPR 2021).

What an image shows is in its phase, how it looks in its amplitude. So amplitudes are mixed, and labels are not:

    x̂ = irfft2(((1-l·w)·|F(x)| + l·w·|F(x')|)·F(x)/|F(x)|),    l ~ Uniform(0, α)
    min_θ  E [ CE(f_θ(x), y) + CE(f_θ(x̂), y) ] / 2,

F the spectrum, x' another image of the minibatch, of any domain, by one random permutation; w a crop around the
frequency zero, of `ratio` of the spectrum, all of it by default as in the paper. With α = 0 it is ERM.

As in the authors' code the two losses are halved, and x̂ is clipped to [0, 1]; theirs is also rounded down to 1/255.
They draw x' from the domains at even odds, and one l for a pair that takes each other's amplitudes; here l is drawn
for each image. A phase of rounding noise counts as 0 (`agfa.nn.spectrum`).
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from agfa.algorithms.base import Algorithm, Backward, Problem, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import Choice
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone
from agfa.nn.spectrum import central_window, decompose, recompose


class Hparams(BaseHparams, frozen=True):
    """The value of the authors' code, for PACS; the search adds the paper's for OfficeHome."""

    alpha: Annotated[float, Choice((0.2, 1.0))] = Field(
        1.0, ge=0, le=1, description="largest share of the other image's amplitude; 0: nothing is mixed"
    )
    ratio: float = Field(
        1.0, ge=0, le=1, description="share of the spectrum that is mixed, around the frequency zero"
    )


class AmpMixup(Algorithm):
    """Cross-entropy on images, and on the same with other amplitudes."""

    name = "ampmixup"
    title = "cross-entropy on images, and on the same mixed with the amplitudes of others"
    paper = "Xu et al. 2021"
    hparams_type = Hparams

    hparams: Hparams
    window: Tensor

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        self.register_buffer("window", central_window(problem.image_shape[1:], hparams.ratio), persistent=False)

    @classmethod
    def passes(cls, hparams: Hparams) -> int:
        """Each image as itself, and mixed."""
        return 2

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the images and their mixtures."""
        logits = self.network(torch.cat([batch.images, self.mixed(batch.images)]))
        loss = F.cross_entropy(logits, batch.labels.repeat(2))
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss)

    def mixed(self, x: Tensor) -> Tensor:
        """x̂, each image with a random share of another's amplitude."""
        others = torch.randperm(len(x)).to(x.device, non_blocking=True)
        share = torch.rand(len(x), 1, 1, 1, device=x.device, dtype=x.dtype) * self.hparams.alpha
        amplitude, phasor = decompose(x)
        change = recompose(self.window * (amplitude[others] - amplitude), phasor, self.problem.image_shape[1:])
        return (x + share * change).clamp(0, 1)
