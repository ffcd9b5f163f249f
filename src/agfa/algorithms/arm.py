"""ARM: Adaptive Risk Minimization: Learning to Adapt to Domain Shift (Zhang, Marklund, Dhawan, Gupta, Levine, Finn;
NeurIPS 2021), the contextual form, ARM-CML.

A context network c_ω (three convolutions) makes one more channel of each image; its mean over the images of a domain
in the batch goes with every one of them to the classifier, and both learn to make use of it:

    min_θ,W,ω  E_d E_(x,y)~d [ -log softmax(W·phi_θ([x, m_d]) + b)_y ],    m_d = mean of c_ω(x) over the batch's x ~ d

**The model adapts to the batch it is given**: it predicts with the mean of that batch's contexts, so give it images
of one source together, as `agfa evaluate` does. An image on its own is its own context.

DomainBed never trains c_ω (its optimiser is made before the network is); here it learns, as in the paper. The first
convolution of a pretrained backbone is widened as in DomainBed: the new channel gets a copy of the first one's
weights. DomainBed fixes the batch at 8 images a source for photographs (`--batch-size 8`), and predicts in groups of
that size where they come out even. There is no strength at which this is ERM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agfa.algorithms.base import Algorithm, Backward, Hparams, Network, Problem, descend, detached
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone, widen
from agfa.nn.shares import shared

WIDTH, KERNEL = 64, 5  # of the context network, as the authors gave it to DomainBed


class ContextNetwork(Network):
    """A network that adapts to the batch it is given: the backbone also sees the mean of the batch's contexts."""

    adapts = True

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        channels = len(backbone.mean)
        super().__init__(widen(backbone, 1), head)
        self.context = nn.Sequential(
            nn.Conv2d(channels, WIDTH, KERNEL, padding=KERNEL // 2),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(),
            nn.Conv2d(WIDTH, 1, KERNEL, padding=KERNEL // 2),
        )

    def features(self, x: Tensor, sizes: tuple[int, ...] | None = None) -> Tensor:
        """phi([x, context]); the batch is one group of images, or groups of these sizes."""
        mean, std = self.backbone.mean[:-1], self.backbone.std[:-1]
        contexts = shared(self.context, (x - mean) / std).to(x.dtype).split_with_sizes(sizes or [len(x)])
        of_group = [context.mean(0).expand_as(context) for context in contexts]
        return self.backbone(torch.cat([x, torch.cat(of_group)], dim=1))  # type: ignore[no-any-return]


class ARM(Algorithm):
    """Adaptive risk minimisation with a context network."""

    name = "arm"
    title = "a context, learnt from the images around, as one more channel of each image"
    paper = "Zhang et al. 2021"
    needs_domains = True

    network: ContextNetwork

    @classmethod
    def make_network(cls, backbone: Backbone, problem: Problem, hparams: Hparams) -> Network:
        """The backbone, taking one more channel, with a linear head and a context network."""
        return ContextNetwork(backbone, nn.Linear(backbone.n_features, problem.n_classes))

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the mean cross-entropy, each image in the context of its source."""
        logits = self.network.head(self.network.features(batch.images, batch.sizes))
        loss = F.cross_entropy(logits, batch.labels)
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss)
