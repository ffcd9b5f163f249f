"""Real images to check an exported model on: some of a dataset, or of a folder of any images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agfa.data.catalog import load as load_dataset
from agfa.data.decode import reason
from agfa.data.domains import DomainDataset, IntArray, image_files, image_suffixes
from agfa.errors import UsageError
from agfa.inference.pictures import Picture, called, square
from agfa.training.model_file import ModelCard


class RealImages(NamedTuple):
    """uint8 images (n, C, S, S) as the network takes them, and the model's number of each one's class, if known."""

    pixels: Tensor
    labels: IntArray | None

    def after(self, n: int) -> RealImages:
        """All but the first n."""
        return RealImages(self.pixels[n:], None if self.labels is None else self.labels[n:])


def real_images(place: str, card: ModelCard, most: int) -> RealImages:
    """Up to `most` images of a dataset, or of a folder of images, drawn from all of them, always the same ones.

    Raises:
        UsageError: there are none, or one of them cannot be read.
    """
    if loose := _loose(Path(place)):
        return RealImages(_squares([loose[i] for i in _drawn(len(loose), most)], card), None)
    dataset, _ = load_dataset(place)
    every = [(domain, i) for domain in dataset.domains for i in range(len(domain))]
    chosen = [every[k] for k in _drawn(len(every), most)]
    pixels = _squares([domain.images[i] for domain, i in chosen], card)
    return RealImages(pixels, _labels(dataset, [int(domain.labels[i]) for domain, i in chosen], card))


def _loose(folder: Path) -> list[Path]:
    """The images of a folder that is no domain/class/image."""
    files = image_files(folder, image_suffixes()) if folder.is_dir() else []
    return [] if any(len(file.relative_to(folder).parts) > 2 for file in files) else files


def _drawn(n: int, most: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(0).permutation(n)[:most]]


def _labels(dataset: DomainDataset, labels: list[int], card: ModelCard) -> IntArray | None:
    """The classes in the model's numbers; None where the dataset has others."""
    if not set(dataset.classes) <= set(card.classes):
        return None
    number = np.array([card.classes.index(name) for name in dataset.classes], dtype=np.int64)
    found: IntArray = number[labels]
    return found


def _squares(pictures: Sequence[Picture], card: ModelCard) -> Tensor:
    pixels = []
    for number, picture in enumerate(pictures):
        try:
            pixels.append(square(picture, card.channels, card.image_size))
        except Exception as error:  # Pillow's plugins raise nearly anything on a damaged file
            raise UsageError(f"{called(picture, number)}: {reason(error)}; --check takes images") from error
    return torch.stack(pixels)
