"""A trained model that answers: images in, classes with their probability and disagreement out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from agfa.algorithms.base import Network
from agfa.data.augment import crop_resize, whole_boxes
from agfa.data.batches import Part, to_unit
from agfa.data.catalog import load as load_dataset
from agfa.data.decode import decode, normalise, reason
from agfa.data.domains import Domain
from agfa.data.store import Progress, open_images, shrink
from agfa.errors import UsageError
from agfa.nn.heads import logits_of
from agfa.nn.predictive import Predictive, predictive
from agfa.training import model_file
from agfa.training.evaluate import Answers, Score, answers
from agfa.training.model_file import ModelCard

Picture = str | Path | Image.Image | npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Prediction:
    """What the model says of one image.

    `disagreement` is the chance that two classifiers drawn from the posterior name different classes;
    None for a head that holds a single classifier.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    disagreement: float | None


class Predictor:
    """A model ready to predict, on `device`."""

    def __init__(self, network: Network, card: ModelCard, device: str = "cpu") -> None:
        try:
            self.device = torch.device(device)
            self.network, self.card = network.to(self.device).eval(), card
        except (RuntimeError, AssertionError) as error:  # no such device, or torch was built without it
            raise UsageError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.card.classes

    def predict(self, images: Iterable[Picture], batch_size: int = 64) -> list[Prediction]:
        """Predict image files, PIL images, or uint8 arrays (height x width [x channels])."""
        return list(self.stream(images, batch_size))

    def stream(self, images: Iterable[Picture], batch_size: int = 64) -> Iterator[Prediction]:
        """Predict images as they come, `batch_size` at a time."""
        pending = iter(images)
        while batch := list(islice(pending, batch_size)):
            pixels = [self._pixels(image) for image in batch]
            boxes = whole_boxes(torch.tensor([p.shape[1:] for p in pixels]))
            x = to_unit(crop_resize(pixels, boxes, self.card.image_size), self.device)
            labels, said = self._answer(x)
            for i, label in enumerate(labels):
                yield Prediction(
                    label=self.classes[label],
                    probability=said.probabilities[i, label].item(),
                    probabilities=dict(zip(self.classes, said.probabilities[i].tolist(), strict=True)),
                    disagreement=None if said.disagreement is None else said.disagreement[i].item(),
                )

    @torch.inference_mode()
    def _answer(self, x: Tensor) -> tuple[list[int], Predictive]:
        """The classes at the posterior means, and the predictive distribution, for images in [0, 1]."""
        mu, sigma = logits_of(self.network.head, self.network.features(x))
        return mu.argmax(-1).tolist(), predictive(mu, sigma, self.card.temperature)

    def _pixels(self, image: Picture) -> Tensor:
        """The stored form of an image: upright, in the model's channels, shrunk."""
        channels = self.card.channels
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        if isinstance(image, Image.Image):
            upright = normalise(image, channels)
        else:
            try:
                upright = decode(Path(image), channels)
            except Exception as error:
                raise UsageError(f"{image}: {reason(error)}") from error
        pixels = np.array(shrink(upright, self.card.image_size))
        return torch.from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1)

    def evaluate(self, data: str, progress: Progress | None = None) -> dict[str, Score]:
        """Score every image of every domain of a dataset, by name or folder.

        Raises:
            UsageError: the dataset's classes are not the model's.
        """
        return {domain.name: said.score() for domain, _, said in self.ask(data, progress)}

    def ask(self, data: str, progress: Progress | None = None) -> Iterator[tuple[Domain, Part, Answers]]:
        """The logits of every image of every domain of a dataset that has any.

        Raises:
            UsageError: the dataset's classes are not the model's.
        """
        dataset, _ = load_dataset(data)
        strange = sorted(set(dataset.classes) - set(self.classes))
        if strange:
            raise UsageError(
                f"{dataset.name} has classes that the model does not know: {', '.join(strange)}; "
                f"it knows {', '.join(self.classes)}"
            )
        number = np.array([self.classes.index(name) for name in dataset.classes], dtype=np.int64)
        images = open_images(dataset, self.card.image_size, self.card.channels, progress)
        for domain in dataset.domains:
            if len(domain):
                part = Part(images[domain.name], number[domain.labels], np.arange(len(domain)))
                yield domain, part, answers(self.network, part, self.card.image_size, self.device)


def load(path: str | Path, device: str = "cpu") -> Predictor:
    """The predictor in a finished run's folder, or of one model in it (`RUN/models/last.safetensors`)."""
    return Predictor(*model_file.load(Path(path)), device)
