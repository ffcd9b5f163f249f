"""What every method is: its networks, its optimisers, its hyperparameters, and one update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone


@dataclass(frozen=True)
class Problem:
    """What a method may know of the data it trains on."""

    n_classes: int
    n_domains: int  # sources
    n_images: int  # source training images
    image_shape: tuple[int, int, int]  # channels, height, width


class Hparams(BaseModel, extra="forbid", frozen=True):
    """The hyperparameters of a method; every method adds its own."""

    lr: float = Field(5e-5, gt=0, description="learning rate (Adam, no weight decay)")


class Backward(Protocol):
    """Adds the gradient of `loss` to `parameters` alone, averaged over processes."""

    def __call__(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Do so."""


class Network(nn.Module):
    """The part that predicts, is averaged and is shipped: images in [0, 1] to features to logits."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor) -> Tensor:
        """Logits, those of the posterior means where the head is Bayesian."""
        return self.head(self.backbone(x))  # type: ignore[no-any-return]  # nn.Module's call is Any


class Algorithm(nn.Module):
    """A method of domain generalisation.

    A subclass names itself (`name`, `title`, `paper`), says what it takes (`hparams_type`), makes its `network` and
    `optimizers` from a backbone, and implements `update`, which reads like its paper's pseudo-code. It knows nothing
    of devices, files, logs, averaging or the clock.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    hparams_type: ClassVar[type[Hparams]] = Hparams
    passes: ClassVar[int] = 1  # images through the backbone for each source image

    network: Network
    optimizers: dict[str, Optimizer]

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Any) -> None:
        super().__init__()
        self.problem, self.hparams = problem, hparams

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step; returns the losses to show, detached."""
        raise NotImplementedError


def descend(loss: Tensor, backward: Backward, *optimizers: Optimizer) -> None:
    """One step down `loss` along the optimisers' own parameters, and no others."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(loss, [p for o in optimizers for group in o.param_groups for p in group["params"]])
    for optimizer in optimizers:
        optimizer.step()


def adam(*groups: tuple[Iterable[nn.Parameter], float]) -> Adam:
    """Adam over (parameters, learning rate) groups, without weight decay."""
    return Adam([{"params": list(parameters), "lr": lr} for parameters, lr in groups], foreach=True)


def detached(**losses: Tensor) -> dict[str, Tensor]:
    """Losses for the record: no graph is kept alive, and no device is waited for."""
    return {key: value.detach() for key, value in losses.items()}


def plain_backward(loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """The `Backward` of a single process."""
    torch.autograd.backward(loss, inputs=list(parameters))
