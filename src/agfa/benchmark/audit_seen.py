"""What a finished training's model says of each image that was held out from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from agfa.data.batches import evaluation_batches
from agfa.data.domains import DomainDataset, IntArray
from agfa.data.splits import Roles
from agfa.data.store import open_images
from agfa.nn.heads import logits_of
from agfa.nn.predictive import predictive
from agfa.training import model_file
from agfa.training.config import CompleteConfig
from agfa.training.evaluate import BATCH
from agfa.training.setup import split


@dataclass(frozen=True)
class Seen:
    """One domain's images, and their classes' probabilities."""

    domain: str
    indices: IntArray  # places in the domain
    labels: IntArray
    probabilities: npt.NDArray[np.float64]
    temperature: float

    @property
    def confidence(self) -> npt.NDArray[np.float64]:
        """The probability of the class that is named."""
        largest: npt.NDArray[np.float64] = self.probabilities.max(axis=1)
        return largest

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether it is the true one."""
        found: npt.NDArray[np.bool_] = self.probabilities.argmax(axis=1) == self.labels
        return found


@torch.inference_mode()
def seen(run: CompleteConfig, model: str, dataset: DomainDataset) -> Iterator[Seen]:
    """Of each domain that the training held out, the images that accuracies are reported on."""
    network, card = model_file.load(run.out / "models" / f"{model}.safetensors")
    parts = split(dataset, open_images(dataset, run.image_size, run.channels), Roles(run.source, run.target), run)
    for domain, part in parts.test.items():
        said = []
        for x, _ in evaluation_batches(part, batch_size=BATCH, image_size=run.image_size, device=torch.device("cpu")):
            mu, sigma = logits_of(network.head, network.features(x))
            said.append(predictive(mu, sigma, card.temperature).probabilities.double().numpy())
        yield Seen(domain, part.indices, part.labels[part.indices], np.concatenate(said), card.temperature)
