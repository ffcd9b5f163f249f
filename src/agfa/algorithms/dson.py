"""DSON: Learning to Optimize Domain Specific Normalization for Domain Generalization
(Seo, Suh, Kim, Kim, Han, Han; ECCV 2020).

Every source domain d normalises feature maps in its own way: by a learnt mixture of the statistics of its minibatch
(batch normalisation) and of the image alone (instance normalisation), with its own gain g and bias b:

    μ_d = w_d·μ_batch(d) + (1-w_d)·μ_image      σ_d² = w_d·σ²_batch(d) + (1-w_d)·σ²_image
    DSON_d(x) = σ_all·(g_d·(x - μ_d)/σ_d + b_d) + μ_all,        w_d = sigmoid(ω_d), shared by all layers.

All else is shared by the domains, and the loss is the cross-entropy of each image under its own domain's
normalisation. What predicts is the mean of the logits of the domains' networks, with running means of the batch
statistics; it costs one pass through the backbone for each source.

Differences from the paper, and why:
- It replaces every batch normalisation of a ResNet. Here those stay as they are (frozen by default, and there are
  none in the ConvNet), and DSON follows the first stages, which all backbones have. Not the fourth: the mean over
  positions comes after it, and a pure instance normalisation would leave nothing of it.
- There, gains and biases start as those of the pretrained batch normalisation, so that the layers that follow get
  what they are used to. A stage's output has none: the mean and deviation of all sources together, μ_all and σ_all,
  take their place. With one source and w = 1 this is ERM exactly.
- The start and the rate of the mixture are ours: w = 0.5, and a learning rate of its own, because Adam at the model's
  would move ω by no more than 0.25 in 5000 steps. There is no strength at which DSON is ERM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from agfa.algorithms.base import Algorithm, Backward, Network, Problem, adam, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone
from agfa.nn.stages import after_stages, stage_channels
from agfa.nn.style import moments

EPS, MOMENTUM = 1e-5, 0.1  # those of torch's batch normalisation


class Hparams(BaseHparams, frozen=True):
    """Ours: the paper's setting replaces other layers. Nothing is searched but what ERM searches."""

    stages: int = Field(3, ge=1, le=3, description="how many stages, from the first, are followed by a normalisation")
    mixture_lr: float = Field(1e-3, ge=0, description="learning rate of the mixture of batch and instance statistics")


class DomainNorm(nn.Module):
    """The normalisation after one stage: gains, biases and running statistics of every domain."""

    mean: Tensor
    variance: Tensor

    def __init__(self, n_domains: int, channels: int) -> None:
        super().__init__()
        shape = (n_domains, channels, 1, 1)
        self.gain, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))

    def forward(self, maps: Tensor, domains: Tensor, weight: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """DSON_d of each image, with w = `weight` of its domain.

        With the `sizes` of the minibatch's domains, their statistics are taken from it, and remembered.
        """
        image_mean, image_variance = moments(maps)
        mean, variance = self.mean, self.variance
        if sizes is not None:
            mean, variance = batch_moments(image_mean, image_variance, sizes)
            self.mean.lerp_(mean.detach(), MOMENTUM)
            self.variance.lerp_(variance.detach(), MOMENTUM)
        mean_all = mean.mean(0)
        deviation_all = ((variance + (mean - mean_all).square()).mean(0) + EPS).sqrt()

        w = weight[domains].view(-1, 1, 1, 1)
        mixed_mean = w * mean[domains] + (1 - w) * image_mean
        deviation = (w * variance[domains] + (1 - w) * image_variance + EPS).sqrt()
        scale = deviation_all * self.gain[domains] / deviation
        shift = deviation_all * self.bias[domains] + mean_all
        return ((maps - mixed_mean) * scale + shift).to(maps.dtype)


def batch_moments(mean: Tensor, variance: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel in each domain (D, C, 1, 1), from those of its images (n, C, 1, 1)."""
    means, variances = [], []
    for of_mean, of_variance in zip(mean.split_with_sizes(sizes), variance.split_with_sizes(sizes), strict=True):
        means.append(of_mean.mean(0))
        variances.append((of_variance + (of_mean - means[-1]).square()).mean(0))
    return torch.stack(means), torch.stack(variances)


class DomainNetworks(Network):
    """One network for each source, alike but for their normalisations; they predict together."""

    def __init__(self, backbone: Backbone, head: nn.Linear, channels: dict[int, int], n_domains: int) -> None:
        super().__init__(backbone, head)
        self.n_domains = n_domains
        self.norms = nn.ModuleDict({str(stage): DomainNorm(n_domains, n) for stage, n in channels.items()})
        self.mixture = nn.Parameter(torch.zeros(n_domains))  # ω

    def features(self, x: Tensor) -> Tensor:
        """The mean over the domains' networks: the head is linear, so logits are their mean too."""
        each = [self.features_as(x, torch.full(x.shape[:1], d, device=x.device)) for d in range(self.n_domains)]
        return torch.stack(each).mean(0)

    def features_as(self, x: Tensor, domains: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Features of images as if of the given domains; `sizes` as in `DomainNorm`."""
        weight = self.mixture.sigmoid()

        def normalised(norm: nn.Module, maps: Tensor) -> Tensor:
            return norm(maps, domains, weight, sizes)  # type: ignore[no-any-return]  # nn.Module's call is Any

        changes = {int(s): lambda maps, norm=norm: normalised(norm, maps) for s, norm in self.norms.items()}
        with after_stages(self.backbone, changes):
            return self.backbone(x)  # type: ignore[no-any-return]  # nn.Module's call is Any


class DSON(Algorithm):
    """Cross-entropy under the normalisation of each image's own domain."""

    name = "dson"
    title = "each source has its own learnt mixture of batch and instance normalisation; all predict together"
    paper = "Seo et al. 2020"
    hparams_type = Hparams
    needs_domains = True

    hparams: Hparams
    network: DomainNetworks

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        mixture = self.network.mixture
        others = [p for p in self.network.parameters() if p is not mixture]
        self.optimizers = {
            "model": adam((others, hparams.lr), ([mixture], hparams.mixture_lr), weight_decay=hparams.weight_decay)
        }

    @classmethod
    def make_network(cls, backbone: Backbone, problem: Problem, hparams: Hparams) -> DomainNetworks:
        """The domains' networks, linear heads on them."""
        channels = stage_channels(backbone, problem.image_shape)
        chosen = {stage: channels[stage] for stage in range(1, hparams.stages + 1)}
        head = nn.Linear(backbone.n_features, problem.n_classes)
        return DomainNetworks(backbone, head, chosen, problem.n_domains)

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the cross-entropy."""
        features = self.network.features_as(batch.images, batch.domains, batch.sizes)
        loss = F.cross_entropy(self.network.head(features), batch.labels)
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss, batch_share=self.network.mixture.sigmoid().mean())
