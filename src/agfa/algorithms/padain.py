"""pAdaIN: Permuted AdaIN: Reducing the Bias Towards Global Statistics in Image Classification
(Nuriel, Benaim, Wolf; CVPR 2021).

After each of the first stages, with probability p, the minibatch is permuted by a random π and every image i gets the
statistics (mean μ and deviation σ of each channel) of image π(i):

    AdaIN(x_i, x_π(i)) = σ(x_π(i)) · (x_i - μ(x_i))/σ(x_i) + μ(x_π(i))

and the loss is the cross-entropy. μ and σ of π(i) are constants to the gradient, those of i are not. With p = 0 this
is ERM.

The paper does so with p = 0.01 after every one of the 49 convolutions of a ResNet-50 that are not shortcuts, 0.49
times a step on average; here stages are what all backbones have, and the default, 0.16 after each of three, comes to
the same number. Not after the fourth: the mean over positions follows there, and would be that of the other image.
Variances are divided by HW as in the paper (the authors' code: HW - 1). No search over p was published.
"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from agfa.algorithms.base import Algorithm, Backward, Problem, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.data.batches import Batch
from agfa.nn import style
from agfa.nn.backbones import Backbone
from agfa.nn.stages import after_stages, stage_channels


class Hparams(BaseHparams, frozen=True):
    """As many swaps a step as in the paper. Nothing is searched but what ERM searches."""

    p: float = Field(0.16, ge=0, le=1, description="probability of swapping statistics after a stage; 0: ERM")
    stages: int = Field(3, ge=1, le=3, description="how many stages, from the first, are followed by swapping")


class PAdaIN(Algorithm):
    """Cross-entropy on images with the statistics of others."""

    name = "padain"
    title = "now and then, images swap their feature statistics"
    paper = "Nuriel et al. 2021"
    hparams_type = Hparams

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        stage_channels(backbone, problem.image_shape)  # refuses a backbone without stages
        super().__init__(backbone, problem, hparams)

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the cross-entropy of the swapped."""

        def swap(maps: Tensor) -> Tensor:
            if not style.happens(self.hparams.p):
                return maps
            return style.swap_moments(maps, style.any_partners(batch.sizes, maps.device))

        with after_stages(self.network.backbone, dict.fromkeys(range(1, self.hparams.stages + 1), swap)):
            loss = F.cross_entropy(self.network(batch.images), batch.labels)
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss)
