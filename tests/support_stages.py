"""What the tests of methods share: a tiny ConvNet of four stages in float64, a minibatch, ERM's gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agfa.algorithms import get
from agfa.algorithms.base import Algorithm, Problem, plain_backward
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone, ConvNet

CLASSES, CHANNELS, SIZE = 3, 1, 8
WIDTHS = (16, 16, 32, 32)  # two channels a group at least: with one, group norm leaves no style


def backbone() -> Backbone:
    return Backbone(ConvNet(CHANNELS, WIDTHS), WIDTHS[-1], (0.5,) * CHANNELS, (0.5,) * CHANNELS, "tiny")


def build(name: str, domains: int = 2, **hparams: object) -> Algorithm:
    """The method on the tiny ConvNet, in float64."""
    torch.manual_seed(0)
    recipe = get(name)
    problem = Problem(CLASSES, domains, 40, (CHANNELS, SIZE, SIZE), steps=100)
    return recipe.method(backbone(), problem, recipe.hparams({"lr": 1e-2, **hparams})).double()


def batch(*sizes: int, seed: int = 1) -> Batch:
    """A minibatch with so many images of each domain, (3, 3) by default; domains differ in brightness."""
    sizes = sizes or (3, 3)
    n = sum(sizes)
    domains = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    images = torch.rand(n, CHANNELS, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Batch((images + domains.view(-1, 1, 1, 1)) / len(sizes), torch.arange(n) % CLASSES, domains, sizes)


def step(algorithm: Algorithm, data: Batch, seed: int = 3) -> dict[str, Tensor]:
    """One update, its random numbers drawn from `seed`."""
    torch.manual_seed(seed)
    return algorithm.update(data, plain_backward)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def erm_gradients(algorithm: Algorithm, data: Batch) -> dict[str, Tensor]:
    """Those of the mean cross-entropy of the backbone with the head."""
    network = copy.deepcopy(algorithm.network)
    network.zero_grad()
    F.cross_entropy(network.head(network.backbone(data.images)), data.labels).backward()
    return gradients(network)


def slope(loss: Callable[[], Tensor], parameters: list[nn.Parameter], eps: float = 1e-8) -> tuple[float, float]:
    """The slope of a loss along a random direction: by its gradients in `parameters`, and by finite differences.

    They are small ones: where a channel is all but dead, normalising it puts the kinks of ReLUs close by.
    """
    generator = torch.Generator().manual_seed(5)
    directions = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in parameters]
    by_gradients = sum(
        (p.grad * d).sum().item() for p, d in zip(parameters, directions, strict=True) if p.grad is not None
    )
    ends = []
    with torch.no_grad():
        for sign in (1, -2):  # forward, back past the start; then to where it was
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=sign * eps)
            ends.append(loss().item())
        for p, d in zip(parameters, directions, strict=True):
            p.add_(d, alpha=eps)
    return by_gradients, (ends[0] - ends[1]) / (2 * eps)


def features_through(network: nn.Module, x: Tensor, change: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Features of the tiny ConvNet, layer by layer; what stage k gives becomes change(k, maps)."""
    x = (x - 0.5) / 0.5
    for i, layer in enumerate(network.backbone.body):
        x = layer(x)
        if i in (2, 5, 8, 11):
            x = change(i // 3 + 1, x)
    return x
