"""What the tests of methods share: a small problem, and what a step descended."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from agfa.algorithms import get
from agfa.algorithms.base import Algorithm, Problem, plain_backward
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone, ConvNet

CLASSES, SHAPE = 3, (1, 8, 8)
SIZES = [(4, 4, 4), (5, 3, 2), (1, 6, 2), (3, 4)]  # images of each domain


class Descent(NamedTuple):
    """A loss that a step went down, and its gradients, by the position of the parameter in the network."""

    loss: float
    gradients: list[Tensor | None]


def build(name: str, domains: int = 3, lr: float = 1e-2, **hparams: object) -> Algorithm:
    torch.manual_seed(0)
    body = ConvNet(SHAPE[0], widths=(16, 16, 32, 32))  # of four stages; a group of one channel would have no style
    backbone = Backbone(body, 32, (0.5,), (0.5,), "tiny")
    recipe = get(name)
    problem = Problem(CLASSES, domains, 40, SHAPE, steps=10)
    return recipe.method(backbone, problem, recipe.hparams({"lr": lr, **hparams})).double()


def batch(sizes: tuple[int, ...] = (4, 4, 4), seed: int = 1) -> Batch:
    """Domains of their own brightness; the first lacks class 0."""
    n = sum(sizes)
    domains = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    images = torch.rand(n, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(n) % CLASSES
    labels = torch.where((domains == 0) & (labels == 0), 1, labels)
    return Batch(images / (1 + domains.view(-1, 1, 1, 1)), labels, domains, sizes)


def update(algorithm: Algorithm, data: Batch, step: int = 0, seed: int = 3) -> dict[str, Tensor]:
    """The step numbered `step`, as the trainer would take it."""
    torch.manual_seed(seed)
    algorithm.step = step
    return algorithm.update(data, plain_backward)


def descents(algorithm: Algorithm, data: Batch, step: int = 0, seed: int = 3) -> list[Descent]:
    """What that step would go down; the algorithm stays as it is."""
    algorithm, found = copy.deepcopy(algorithm), []

    def backward(loss, parameters):
        plain_backward(loss, parameters)
        gradients = [None if p.grad is None else p.grad.clone() for p in algorithm.network.parameters()]
        found.append(Descent(loss.item(), gradients))

    torch.manual_seed(seed)
    algorithm.step = step
    algorithm.update(data, backward)
    return found


def erm_gradients(algorithm: Algorithm, data: Batch) -> list[Tensor]:
    """Of the mean cross-entropy, for the parameters of the network."""
    network = copy.deepcopy(algorithm.network)
    loss = F.cross_entropy(network(data.images), data.labels)
    return list(torch.autograd.grad(loss, list(network.parameters())))


def slopes(algorithm: Algorithm, data: Batch, step: int = 0, descent: int = -1) -> tuple[float, float]:
    """Along a random direction, the slope of what the step goes down (last): by its gradient, by finite differences.

    They are small ones: through a thousand ReLUs there is a kink close by.
    """
    torch.manual_seed(8)
    direction = [torch.randn_like(p) for p in algorithm.network.parameters()]
    gradients = descents(algorithm, data, step)[descent].gradients
    slope = sum((g * d).sum().item() for g, d in zip(gradients, direction, strict=True))
    ends = []
    for h in (1e-8, -1e-8):
        moved = copy.deepcopy(algorithm)
        with torch.no_grad():
            for p, d in zip(moved.network.parameters(), direction, strict=True):
                p += h * d
        ends.append(descents(moved, data, step)[descent].loss)
    return slope, (ends[0] - ends[1]) / 2e-8


def resumed(name: str, data: Batch, steps: int, at: int, **hparams: object) -> bool:
    """Whether a run saved after step `at` and taken up by a new algorithm ends with the same bits."""
    straight = build(name, len(data.sizes), **hparams)
    for step in range(steps):
        if step == at:
            state = copy.deepcopy(straight.state_dict())
            optimizers = {key: copy.deepcopy(o.state_dict()) for key, o in straight.optimizers.items()}
        update(straight, data, step, seed=step)
    again = build(name, len(data.sizes), **hparams)
    again.load_state_dict(state)
    for key, optimizer in again.optimizers.items():
        optimizer.load_state_dict(optimizers[key])
    for step in range(at, steps):
        update(again, data, step, seed=step)
    return all(torch.equal(value, again.state_dict()[key]) for key, value in straight.state_dict().items())


def in_bfloat16(algorithm: Algorithm, data: Batch, step: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a step shows in float32, and under autocast."""
    data = data._replace(images=data.images.float())
    plain = update(copy.deepcopy(algorithm).float(), data, step)
    with torch.autocast("cpu", torch.bfloat16):
        return plain, update(copy.deepcopy(algorithm).float(), data, step)
