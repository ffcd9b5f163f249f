"""What every method is: its networks, its optimisers, its hyperparameters, and one update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from agfa.algorithms.search import LogUniform
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone


@dataclass(frozen=True)
class Problem:
    """What a method may know of the data it trains on."""

    n_classes: int
    n_domains: int  # sources
    n_images: int  # source training images
    image_shape: tuple[int, int, int]  # channels, height, width
    steps: int = 1  # of the whole training


class Hparams(BaseModel, extra="forbid", frozen=True):
    """The hyperparameters of a method; every method adds its own.

    What a random search draws from stands beside each, as `agfa.algorithms.search` has it: DomainBed's published
    distributions for photographs, unless a method says otherwise.
    """

    lr: Annotated[float, LogUniform(1e-5, 10**-3.5)] = Field(5e-5, gt=0, description="learning rate of Adam")
    weight_decay: Annotated[float, LogUniform(1e-6, 1e-2)] = Field(0.0, ge=0, description="weight decay of Adam")


class Backward(Protocol):
    """Adds the gradient of `loss` to `parameters` alone, averaged over processes."""

    def __call__(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Do so."""


class Network(nn.Module):
    """The part that predicts, is averaged and is shipped: images in [0, 1] to features to logits."""

    adapts: ClassVar[bool] = False  # whether what it says of an image depends on the images beside it

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def features(self, x: Tensor) -> Tensor:
        """What the head is given."""
        return self.backbone(x)  # type: ignore[no-any-return]  # nn.Module's call is Any

    def forward(self, x: Tensor) -> Tensor:
        """Logits, those of the posterior means where the head is Bayesian."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Algorithm(nn.Module):
    """A method of domain generalisation.

    A subclass names itself (`name`, `title`, `paper`), says what it takes (`hparams_type`), and implements `update`,
    which reads like its paper's pseudo-code. Unless it makes its own, its `network` is the backbone with a linear
    head, and its one optimiser, "model", moves all of it. It knows nothing of devices, files, logs, averaging or the
    clock.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    hparams_type: ClassVar[type[Hparams]] = Hparams
    needs_domains: ClassVar[bool] = False  # whether it asks which domain an image is from
    min_domains: ClassVar[int] = 1  # sources without which it has nothing to do
    averaging: ClassVar[str] = "none"  # what its paper does

    network: Network
    optimizers: dict[str, Optimizer]
    step: int = 0  # steps taken before this one; the trainer keeps it

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Any) -> None:
        super().__init__()
        self.problem, self.hparams = problem, hparams
        self.network = self.make_network(backbone, problem, hparams)
        self.optimizers = {"model": adam((self.network.parameters(), hparams.lr), weight_decay=hparams.weight_decay)}

    @classmethod
    def make_network(cls, backbone: Backbone, problem: Problem, hparams: Any) -> Network:
        """The network that predicts; a model's file is loaded into one made by this."""
        return Network(backbone, nn.Linear(backbone.n_features, problem.n_classes))

    @classmethod
    def passes(cls, hparams: Any) -> int:
        """Images through the backbone for each source image; batches are made smaller by it."""
        return 1

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step; returns the losses to show, detached."""
        raise NotImplementedError

    def warnings(self, losses: Mapping[str, float]) -> dict[str, str]:
        """What has gone wrong, by name, in words. Asked at each record, with the mean losses since the last."""
        return {}


def descend(loss: Tensor, backward: Backward, *optimizers: Optimizer) -> None:
    """One step down `loss` along the optimisers' own parameters, and no others."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(loss, [p for o in optimizers for group in o.param_groups for p in group["params"]])
    for optimizer in optimizers:
        optimizer.step()
    torch.clear_autocast_cache()  # or this step's next pass would use the weights as they were


@contextmanager
def constant(module: nn.Module) -> Iterator[None]:
    """Take a module's parameters as constants: gradients go through it, and no work or memory goes into its own."""
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def adam(
    *groups: tuple[Iterable[nn.Parameter], float],
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
) -> Adam:
    """Adam over (parameters, learning rate) groups."""
    listed = [{"params": list(parameters), "lr": lr} for parameters, lr in groups]
    return Adam(listed, betas=betas, weight_decay=weight_decay, fused=True)


def detached(**losses: Tensor) -> dict[str, Tensor]:
    """Losses for the record: no graph is kept alive, and no device is waited for."""
    return {key: value.detach() for key, value in losses.items()}


def plain_backward(loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """The `Backward` of a single process."""
    torch.autograd.backward(loss, inputs=list(parameters))
