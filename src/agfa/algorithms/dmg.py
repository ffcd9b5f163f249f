"""DMG: Learning to Balance Specificity and Invariance for In and Out of Domain Generalization
(Chattopadhyay, Balaji, Hoffman; ECCV 2020).

Every source domain d has a mask over the channels that go into stage 3, stage 4 and the head, of probabilities
m_d = sigmoid(m~_d). An image of domain d is trained under masks drawn for it alone, and domains are kept from
sharing all of their channels:

    min  E_d,(x,y)~d  -log softmax(f(x; b))_y  +  λ_O · sum_layers mean_pairs(d,d') sIoU(m_d, m_d'),
    b ~ Bernoulli(m_d),  sIoU(m, m') = sum(m·m') / sum(m + m' - m·m')

with straight-through gradients: that of b is given to m_d. What predicts is the mean over the sources of the logits
under the soft masks m_d; it costs one pass through the backbone for each source.

λ_O = 0.1, m~ ~ Uniform(0, 1) at the start and the masks' learning rate of 1e-4 are those of the authors' code, which
publishes no search, averages over pairs, and masks whole channels in ResNets, as here. It validates sources under
their own hard masks; here what is validated is what predicts. Without the overlap (λ_O = 0) there are still masks:
no strength makes this ERM.
"""

from __future__ import annotations

from itertools import combinations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from agfa.algorithms.base import Algorithm, Backward, Network, Problem, adam, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone
from agfa.nn.stages import after_stages, stage_channels

STAGES = (2, 3)  # those whose outputs are masked, beside the features


class Hparams(BaseHparams, frozen=True):
    """The values of the authors' code. Nothing is searched but what ERM searches."""

    overlap: float = Field(0.1, ge=0, description="λ_O, the weight of the masks' overlap")
    mask_lr: float = Field(1e-4, ge=0, description="learning rate of the masks")


class MaskedNetworks(Network):
    """One network for each source, alike but for their masks; they predict together."""

    def __init__(self, backbone: Backbone, head: nn.Linear, channels: tuple[int, ...], n_domains: int) -> None:
        super().__init__(backbone, head)
        self.masks = nn.ParameterList(torch.rand(n_domains, n) for n in channels)  # m~ after STAGES, and of features

    def features(self, x: Tensor) -> Tensor:
        """The mean over the sources' soft masks: the head is linear, so logits are their mean too."""
        each = [self.masked_features(x, list(soft)) for soft in zip(*self.probabilities(), strict=True)]
        return torch.stack(each).mean(0)

    def masked_features(self, x: Tensor, masks: list[Tensor]) -> Tensor:
        """Features under masks (C,) or (n, C) of each place."""
        *inner, last = masks

        def masked(maps: Tensor, mask: Tensor) -> Tensor:
            return maps * mask[..., None, None].to(maps.dtype)

        changes = {s: lambda maps, mask=mask: masked(maps, mask) for s, mask in zip(STAGES, inner, strict=True)}
        with after_stages(self.backbone, changes):
            return self.backbone(x) * last  # type: ignore[no-any-return]  # nn.Module's call is Any

    def probabilities(self) -> list[Tensor]:
        """m of each place, (D, C)."""
        return [mask.sigmoid() for mask in self.masks]


def soft_iou(m: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of two masks of probabilities."""
    both = m * other
    return both.sum() / (m + other - both).sum()


def draw(probabilities: Tensor) -> Tensor:
    """b ~ Bernoulli(m), whose gradient is m's."""
    drawn = torch.bernoulli(probabilities.detach())
    return drawn + probabilities - probabilities.detach()


class DMG(Algorithm):
    """Cross-entropy under random masks of each image's own domain, and the overlap of the masks."""

    name = "dmg"
    title = "each source masks channels of its own choice; all masks predict together"
    paper = "Chattopadhyay et al. 2020"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2  # there is no other mask to differ from

    hparams: Hparams
    network: MaskedNetworks

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        shared = [*self.network.backbone.parameters(), *self.network.head.parameters()]
        masks = self.network.masks.parameters()
        self.optimizers = {
            "model": adam((shared, hparams.lr), (masks, hparams.mask_lr), weight_decay=hparams.weight_decay)
        }

    @classmethod
    def make_network(cls, backbone: Backbone, problem: Problem, hparams: Hparams) -> MaskedNetworks:
        """The sources' networks, linear heads on them."""
        channels = stage_channels(backbone, problem.image_shape)
        head = nn.Linear(backbone.n_features, problem.n_classes)
        places = (*(channels[stage] for stage in STAGES), backbone.n_features)
        return MaskedNetworks(backbone, head, places, problem.n_domains)

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the cross-entropy and the overlap."""
        probabilities = self.network.probabilities()
        features = self.network.masked_features(batch.images, [draw(m[batch.domains]) for m in probabilities])
        nll = F.cross_entropy(self.network.head(features), batch.labels)
        overlap = torch.stack(
            [
                torch.stack([soft_iou(m, other) for m, other in combinations(layer, 2)]).mean()
                for layer in probabilities
            ]
        ).sum()
        descend(nll + self.hparams.overlap * overlap, backward, self.optimizers["model"])
        return detached(nll=nll, overlap=overlap)
