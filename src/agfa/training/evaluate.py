"""How well a network does on some images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn

from agfa.algorithms.base import Network
from agfa.data.batches import Part, evaluation_batches, squashed
from agfa.data.domains import IntArray
from agfa.nn.heads import logits_of

Place = tuple[str, str, str]  # role, domain, split

BATCH = 256
KEPT = 2**30  # bytes of images kept for the next evaluation; those beyond are read again


class Score(NamedTuple):
    """Accuracy and mean cross-entropy over n images."""

    accuracy: float
    loss: float
    n: int

    @classmethod
    def of(cls, totals: Tensor) -> Score:
        """From the sums that `totals` returns, of one process or added over several."""
        right, loss, n = totals.tolist()
        return cls(right / max(1, n), loss / max(1, n), int(n))


class Kept:
    """Parts whose images are squashed once for all evaluations, as many as there is room for."""

    def __init__(self, image_size: int) -> None:
        self.image_size, self.room = image_size, KEPT
        self.parts: dict[tuple[Place, int], Part] = {}

    def __call__(self, place: Place, part: Part) -> Part:
        """The part as it was kept: there are no two of one place with as many images."""
        key = (place, len(part))
        if key not in self.parts:
            size = len(part) * self.image_size**2 * len(part.images[0])
            fits = size <= self.room
            self.room -= size if fits else 0
            self.parts[key] = squashed(part, self.image_size) if fits else part
        return self.parts[key]


Scores = dict[Place, Score]


class Answers(NamedTuple):
    """The logits of some images, their means and deviations (None: a single classifier), and the right classes."""

    mu: Tensor
    sigma: Tensor | None
    labels: Tensor

    def gathered(self, fabric: Fabric, n: int) -> Answers:
        """Those of all processes, to each: the n images that they shared out evenly."""
        if fabric.world_size == 1:
            return self

        def joint(mine: Tensor) -> Tensor:
            of_each = [torch.empty_like(mine) for _ in range(fabric.world_size)]
            dist.all_gather(of_each, mine.contiguous())
            return torch.stack(of_each, 1).flatten(0, 1)[:n]

        return Answers(joint(self.mu), None if self.sigma is None else joint(self.sigma), joint(self.labels))

    def score(self) -> Score:
        """The right answers at the posterior means."""
        right = (self.mu.argmax(-1) == self.labels).sum().item()
        loss = F.cross_entropy(self.mu, self.labels, reduction="sum").item()
        n = len(self.labels)
        return Score(right / max(1, n), loss / max(1, n), n)


@torch.inference_mode()
def totals(
    network: nn.Module,
    part: Part,
    image_size: int,
    device: torch.device,
    autocast: AbstractContextManager[object] | None = None,
) -> Tensor:
    """Right answers, summed cross-entropy and number of the whole images of `part`, at the posterior means."""
    right = torch.zeros((), dtype=torch.float64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    part = part.at(part.indices[_order(len(part))])
    with _evaluating(network), autocast or nullcontext():
        for x, y in evaluation_batches(part, batch_size=BATCH, image_size=image_size, device=device):
            logits = network(x).float()
            right += (logits.argmax(-1) == y).sum()
            loss += F.cross_entropy(logits, y, reduction="sum")
    return torch.stack([right, loss, torch.full_like(loss, len(part))])


@torch.inference_mode()
def answers(network: Network, part: Part, image_size: int, device: torch.device) -> Answers:
    """What the network says of the whole images of `part`, in their order, in float32 on the device."""
    order = _order(len(part))
    shuffled = part.at(part.indices[order])
    means, deviations = [], []
    with _evaluating(network):
        for x, _ in evaluation_batches(shuffled, batch_size=BATCH, image_size=image_size, device=device):
            mu, sigma = logits_of(network.head, network.features(x))
            means.append(mu)
            deviations.append(sigma)
    back = torch.from_numpy(np.argsort(order)).to(device)
    found = [sigma for sigma in deviations if sigma is not None]
    labels = torch.from_numpy(part.labels[part.indices]).to(device)
    return Answers(torch.cat(means)[back], torch.cat(found)[back] if found else None, labels)


def _order(n: int) -> IntArray:
    """One random order, always the same: a method that adapts to the batch it is given must not be given one class
    at a time.
    """
    return np.random.default_rng(0).permutation(n)


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """The network as it predicts; it is left in the mode it was in."""
    training, tuning = network.training, torch.backends.cudnn.benchmark
    network.eval()
    torch.backends.cudnn.benchmark = False  # it would tune for every domain's odd last batch, for seconds each
    yield
    network.train(training)
    torch.backends.cudnn.benchmark = tuning


def finals_of(records: Iterable[dict[str, Any]]) -> dict[str, Scores]:
    """What a run's records say of each model that it ended with."""
    found: dict[str, Scores] = {}
    for r in records:
        if r["kind"] == "final":
            score = Score(r["accuracy"], r["loss"], r["n"])
            found.setdefault(r["model"], {})[r["role"], r["domain"], r["split"]] = score
    return found


def mean_accuracy(scores: Scores, split: str) -> float | None:
    """Mean over domains of their accuracy on `split`; None where none has it."""
    found = [score.accuracy for (_, _, name), score in scores.items() if name == split]
    return sum(found) / len(found) if found else None


def mean_loss(scores: Scores, split: str) -> float:
    """Mean over domains of their mean loss on `split`."""
    found = [score.loss for (_, _, name), score in scores.items() if name == split]
    return sum(found) / len(found)
