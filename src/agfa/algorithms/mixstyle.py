"""MixStyle: Domain Generalization with MixStyle (Zhou, Yang, Qiao, Xiang; ICLR 2021).

After each of the first stages, with probability p, feature maps x keep their content and get a style (the mean μ and
the deviation σ of each channel) between their own and that of another image x~ of the minibatch:

    MixStyle(x) = (λ·σ(x) + (1-λ)·σ(x~)) · (x - μ(x))/σ(x) + λ·μ(x) + (1-λ)·μ(x~),    λ ~ Beta(α, α), one per image

and the loss is the cross-entropy. No gradient goes through μ and σ. x~ is any image (`mix: random`, a permutation
of the minibatch) or one of another domain (`mix: crossdomain`). With p = 0 this is ERM.

The defaults are the paper's, which SWAD's published runs have too, and neither searches over them. Variances are
divided by HW as in the paper, where the authors' code divides by HW - 1: the two cancel but for eps = 1e-6. In the
authors' code a minibatch is made of two domains that exchange styles; here all sources are in it, and each takes
after another that is drawn anew.

With μ and σ constants, the gradient of x is scaled by the mixed σ over its own: by up to 1/√eps in a channel that
hardly varies in one image and does in the other. Where many do not (the ConvNet on digits) nothing is learnt: see
eps.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from agfa.algorithms.base import Algorithm, Backward, Problem, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.data.batches import Batch
from agfa.errors import UsageError
from agfa.nn import style
from agfa.nn.backbones import Backbone
from agfa.nn.stages import after_stages, stage_channels


class Hparams(BaseHparams, frozen=True):
    """The paper's values; stages 1 to 3 are its choice for PACS (for OfficeHome, 1 and 2).

    Nothing is searched but what ERM searches.
    """

    p: float = Field(0.5, ge=0, le=1, description="probability of mixing after a stage; 0: ERM")
    alpha: float = Field(0.1, gt=0, description="of Beta(alpha, alpha), from which the shares are drawn")
    mix: Literal["random", "crossdomain"] = Field("random", description="with any image, or one of another domain")
    eps: float = Field(
        1e-6, gt=0, description="added to variances; more tames the gradient of channels that hardly vary"
    )
    stages: int = Field(3, ge=1, le=4, description="how many stages, from the first, are followed by mixing")


class MixStyle(Algorithm):
    """Cross-entropy on images of mixed styles."""

    name = "mixstyle"
    title = "the feature statistics of an image are mixed with those of another"
    paper = "Zhou et al. 2021"
    hparams_type = Hparams

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        stage_channels(backbone, problem.image_shape)  # refuses a backbone without stages
        if hparams.mix == "crossdomain" and problem.n_domains < 2:
            raise UsageError(
                f"hparams of {self.name}: mix crossdomain needs 2 source domains; with one, set mix random"
            )
        super().__init__(backbone, problem, hparams)

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the cross-entropy of the mixed."""
        pair = style.any_partners if self.hparams.mix == "random" else style.cross_domain_partners

        def mix(maps: Tensor) -> Tensor:
            if not style.happens(self.hparams.p):
                return maps
            share = style.beta_shares(len(maps), self.hparams.alpha, maps.device)
            return self.mixed(maps, pair(batch.sizes, maps.device), share)

        with after_stages(self.network.backbone, dict.fromkeys(range(1, self.hparams.stages + 1), mix)):
            loss = F.cross_entropy(self.network(batch.images), batch.labels)
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss)

    def mixed(self, maps: Tensor, partners: Tensor, share: Tensor) -> Tensor:
        """MixStyle(x)."""
        return style.mix_moments(maps, partners, share, self.hparams.eps)
