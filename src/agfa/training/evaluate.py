"""How well a network does on some images."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agfa.data.batches import Part, evaluation_batches, squashed

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
        self.parts: dict[object, Part] = {}

    def __call__(self, key: object, part: Part) -> Part:
        """The part as it was kept under this key."""
        if key not in self.parts:
            size = len(part) * self.image_size**2 * len(part.images[0])
            fits = size <= self.room
            self.room -= size if fits else 0
            self.parts[key] = squashed(part, self.image_size) if fits else part
        return self.parts[key]


Scores = dict[tuple[str, str, str], Score]  # of (role, domain, split)


@torch.inference_mode()
def totals(
    network: nn.Module,
    part: Part,
    image_size: int,
    device: torch.device,
    autocast: AbstractContextManager[object] | None = None,
) -> Tensor:
    """Right answers, summed cross-entropy and number of the whole images of `part`, at the posterior means.

    They come in one random order, always the same: a method that adapts to the batch it is given must not be given
    one class at a time. The network is left in the mode it was in.
    """
    order = np.random.default_rng(0).permutation(len(part))
    part = Part(part.images, part.labels, part.indices[order])
    training, tuning = network.training, torch.backends.cudnn.benchmark
    network.eval()
    torch.backends.cudnn.benchmark = False  # it would tune for every domain's odd last batch, for seconds each
    right = torch.zeros((), dtype=torch.float64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    with autocast or nullcontext():
        for x, y in evaluation_batches(part, batch_size=BATCH, image_size=image_size, device=device):
            logits = network(x).float()
            right += (logits.argmax(-1) == y).sum()
            loss += F.cross_entropy(logits, y, reduction="sum")
    network.train(training)
    torch.backends.cudnn.benchmark = tuning
    return torch.stack([right, loss, torch.full_like(loss, len(part))])


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
