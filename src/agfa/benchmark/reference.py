"""What `agfa bench` compares with: plain loops, as one writes them the first time.

Full precision, one image layout for all, torch's own Adam, a pass for every need. Nothing here is shared with the
rest of the package, or made faster: it is the yardstick.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from agfa.nn.backbones import build_backbone

Step = Callable[[Tensor, Tensor], None]  # takes images in [0, 1] and their classes
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RATE, ETA, ALPHA = 5e-5, 0.1, 1.0


class Features(nn.Module):
    """torchvision's model of that name where there is one, else ours unchanged; statistics frozen."""

    mean: Tensor
    std: Tensor

    def __init__(self, name: str, image_size: int) -> None:
        super().__init__()
        if hasattr(torchvision.models, name):
            body = torchvision.models.get_model(name, weights=None)
            self.n_features = body.fc.in_features
            body.fc = nn.Identity()
            self.body: nn.Module = body
            self.register_buffer("mean", torch.tensor(MEAN).view(-1, 1, 1))
            self.register_buffer("std", torch.tensor(STD).view(-1, 1, 1))
        else:
            backbone = build_backbone(name, 3, image_size, weights="none")
            self.body, self.n_features = backbone.body, backbone.n_features
            self.register_buffer("mean", backbone.mean)
            self.register_buffer("std", backbone.std)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Features of images in [0, 1]."""
        features: Tensor = self.body((x - self.mean) / self.std)
        return features


def erm(name: str, image_size: int, classes: int, device: torch.device) -> tuple[Step, list[nn.Module]]:
    """Cross-entropy."""
    features = Features(name, image_size).to(device)
    head = nn.Linear(features.n_features, classes).to(device)
    optimizer = torch.optim.Adam([*features.parameters(), *head.parameters()], lr=RATE)

    def step(x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(head(features(x)), y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()

    return step, [features, head]


def agfa(
    name: str, image_size: int, classes: int, device: torch.device, samples: int
) -> tuple[Step, list[nn.Module]]:
    """Algorithm 1 to the letter: whole spectra by angle, cosine and sine, weights drawn from the posterior."""
    features = Features(name, image_size).to(device)
    mean = nn.Parameter(torch.randn(classes, features.n_features, device=device) / math.sqrt(features.n_features))
    log_variance = nn.Parameter(torch.full_like(mean, 2 * math.log(0.01)))
    generator = nn.Linear(100, 3 * image_size**2).to(device)
    model_optimizer = torch.optim.Adam([*features.parameters(), mean, log_variance], lr=RATE)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=RATE)

    def generated(x: Tensor) -> Tensor:
        amplitude = F.softplus(generator(torch.randn(len(x), 100, device=device))).view(x.shape)
        spectrum = torch.fft.fft2(x, norm="ortho")
        strength = ALPHA * torch.rand(len(x), 1, 1, 1, device=device)
        mixed = strength * amplitude + (1 - strength) * spectrum.abs()
        phase = spectrum.angle()
        images: Tensor = torch.fft.ifft2(torch.complex(mixed * phase.cos(), mixed * phase.sin()), norm="ortho").real
        return images

    def negative_elbo(phi: Tensor, y: Tensor) -> Tensor:
        weights = mean + (log_variance / 2).exp() * torch.randn(samples, *mean.shape, device=device)
        logits = torch.einsum("nd,scd->snc", phi, weights)
        nll = torch.stack([F.cross_entropy(each, y) for each in logits]).mean()
        kl = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum()
        return nll + kl / 1000

    def discrepancy(phi: Tensor, y: Tensor) -> Tensor:
        mu = phi @ mean.detach().T
        sigma = (phi.square() @ log_variance.detach().exp().T + 1e-12).sqrt()
        own = F.one_hot(y, classes).bool()
        rivals = (mu + 1.96 * sigma).masked_fill(own, -torch.inf).amax(1)
        return (1 + rivals - (mu - 1.96 * sigma)[own]).clamp(min=0).mean()

    def step(x: Tensor, y: Tensor) -> None:
        x_t = generated(x)
        loss = negative_elbo(features(x), y) + ETA * discrepancy(features(x_t.detach()), y)
        model_optimizer.zero_grad()
        torch.autograd.backward(loss)
        model_optimizer.step()
        loss = -discrepancy(features(x_t), y)
        generator_optimizer.zero_grad()
        torch.autograd.backward(loss)
        generator_optimizer.step()

    return step, [features, generator]
