"""A trained model that answers: images in, classes with their probability and disagreement out."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agfa.algorithms.base import Network
from agfa.data.batches import Part, to_unit
from agfa.data.catalog import load as load_dataset
from agfa.data.decode import reason
from agfa.data.domains import Domain
from agfa.data.store import Progress, open_images
from agfa.errors import UsageError
from agfa.inference import places
from agfa.inference.pictures import Picture, Pictures, called, one_by_one, square
from agfa.nn.heads import logits_of
from agfa.nn.predictive import Predictive, predictive
from agfa.training import model_file
from agfa.training.evaluate import Answers, Score, answers
from agfa.training.model_file import Audit, ModelCard

AHEAD = 2  # batches decoded while the model works


@dataclass(frozen=True)
class Prediction:
    """What the model says of one image.

    `disagreement` is the chance that two classifiers drawn from the posterior name different classes;
    None for a head that holds a single classifier. `abstain`: the probability is below what the accuracy that was
    asked for takes.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    disagreement: float | None
    abstain: bool = False


class Predictor:
    """A model ready to predict, on `device`.

    With an `accuracy`, it abstains from images of which it is less sure than it had to be to be right that often on
    domains held out in the audit that its card tells of; `threshold` is that probability.
    """

    def __init__(self, network: Network, card: ModelCard, device: str = "cpu", accuracy: float | None = None) -> None:
        self.threshold = 0.0 if accuracy is None else least_confidence(card.audit, accuracy)
        try:
            self.device = torch.device(device)
            self.network, self.card = network.to(self.device).eval(), card
        except (RuntimeError, AssertionError) as error:  # no such device, or torch was built without it
            raise UsageError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.card.classes

    def predict(self, images: Pictures, batch_size: int = 64) -> list[Prediction]:
        """Predict image files or addresses, PIL images, arrays (height x width [x channels]) or tensors.

        Arrays are uint8, or floats in [0, 1]; tensors have their channels first. Those of four dimensions are several
        images. What `evaluate` measures is this, to the bit where batches are the same.

        Raises:
            UsageError: one of them is no image.
        """
        return [_or_raise(said) for said in self.attempts(images, batch_size, AHEAD)]

    def stream(self, images: Pictures, batch_size: int = 64) -> Iterator[Prediction]:
        """Predict images as they come: no more than `batch_size` are taken before the first is answered."""
        return (_or_raise(said) for said in self.attempts(images, batch_size))

    def attempts(self, images: Pictures, batch_size: int = 64, ahead: int = 0) -> Iterator[Prediction | UsageError]:
        """The prediction of each image, or why there is none, in order.

        Images are decoded in threads, with `ahead` batches while the model works on another.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be 1 or more")
        waiting: deque[list[Future[Tensor | UsageError]]] = deque()
        numbered = enumerate(one_by_one(images))
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            while batch := list(islice(numbered, batch_size)):
                waiting.append([pool.submit(self._read, number, image) for number, image in batch])
                if len(waiting) > ahead:
                    yield from self._answers(waiting.popleft())
            while waiting:
                yield from self._answers(waiting.popleft())
        finally:  # whoever stops listening waits for no image
            pool.shutdown(cancel_futures=True)

    def answer(self, pixels: Tensor) -> list[Prediction]:
        """Predict images made ready (`agfa.inference.pictures.square`): uint8, n x C x H x W."""
        return self.judge(to_unit(pixels, self.device))

    def judge(self, x: Tensor) -> list[Prediction]:
        """Predict images of numbers about [0, 1], n x C x H x W, on the model's device."""
        labels, (probabilities, disagreements) = self._say(x)
        shares = [None] * len(labels) if disagreements is None else disagreements.tolist()
        said = []
        for label, each, disagreement in zip(labels, probabilities.tolist(), shares, strict=True):
            named = dict(zip(self.classes, each, strict=True))
            unsure = each[label] < self.threshold
            said.append(Prediction(self.classes[label], each[label], named, disagreement, unsure))
        return said

    @torch.inference_mode()
    def _say(self, x: Tensor) -> tuple[list[int], Predictive]:
        """The classes at the posterior means, and the predictive distribution, for images in [0, 1]."""
        mu, sigma = logits_of(self.network.head, self.network.features(x))
        return mu.argmax(-1).tolist(), predictive(mu, sigma, self.card.temperature)

    def _read(self, number: int, image: Picture) -> Tensor | UsageError:
        try:
            return square(image, self.card.channels, self.card.image_size)
        except Exception as error:  # Pillow's plugins raise nearly anything on a damaged file
            return UsageError(f"{called(image, number)}: {reason(error)}")

    def _answers(self, batch: list[Future[Tensor | UsageError]]) -> Iterator[Prediction | UsageError]:
        """In the order of the batch; those that cannot be read are not given to the model."""
        read = [future.result() for future in batch]
        pixels = [image for image in read if isinstance(image, Tensor)]
        said = iter(self.answer(torch.stack(pixels)) if pixels else ())
        for image in read:
            yield image if isinstance(image, UsageError) else next(said)

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


def least_confidence(audit: Audit | None, accuracy: float) -> float:
    """The smallest probability from which on an audit's held-out domains were right that often.

    Raises:
        UsageError: there was no audit, or they never were.
    """
    if not 0 < accuracy <= 1:
        raise UsageError(f"accuracy is {accuracy}; it must be in (0, 1], 0.95 for 95%")
    if audit is None:
        raise UsageError(
            "when to abstain is not known, as the model was trained without an audit: run agfa audit, "
            "then agfa train with --audit"
        )
    enough = [confidence for confidence, _, right in audit.coverage if right >= accuracy]
    if not enough:
        best = max((right for *_, right in audit.coverage), default=0.0)
        raise UsageError(
            f"on held-out domains the model was never right {accuracy:.1%} of the time, at best {best:.1%}"
        )
    return min(enough)


def load(place: str | Path, device: str = "cpu", accuracy: float | None = None) -> Predictor:
    """The predictor in a finished run's folder, or of one model in it (`RUN/models/last.safetensors`).

    It may also be on the hub (`hf:OWNER/NAME[@REVISION]`), or at any address that fsspec reaches (`s3://...`).
    """
    with places.here(place) as model:
        return Predictor(*model_file.load(model), device, accuracy)


def _or_raise(said: Prediction | UsageError) -> Prediction:
    if isinstance(said, UsageError):
        raise said
    return said
