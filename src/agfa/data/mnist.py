"""ColoredMNIST and RotatedMNIST, made from the 70,000 images of MNIST as DomainBed makes them.

The images are shuffled and dealt out to the domains in turn, so that no digit is in two of them.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from agfa.data.domains import Domain, DomainDataset, IntArray, Pixels
from agfa.errors import UsageError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
ANGLES = (0, 15, 30, 45, 60, 75)
COLOR_FLIPS = {"+90%": 0.1, "+80%": 0.2, "-90%": 0.9}  # the chance that an image's colour is not its label's
LABEL_NOISE = 0.25
SEED = 0  # the datasets are the same whatever a run's seed is


def colored_mnist(folder: Path) -> DomainDataset:
    """Is the digit below 5? A quarter of the labels are wrong, and the colour tells them better than the shape.

    Two channels, of which an image has one. The colour agrees with the (noisy) label in 90%, 80% and 10% of images.
    """
    images, digits, keys = _shuffled(folder)
    domains = []
    for d, (name, flip) in enumerate(COLOR_FLIPS.items()):
        mine = slice(d, None, len(COLOR_FLIPS))
        draw = np.random.default_rng((SEED, d))
        labels = (digits[mine] < 5) ^ (draw.random(len(digits[mine])) < LABEL_NOISE)
        colors = labels ^ (draw.random(len(labels)) < flip)
        pixels = np.zeros((len(labels), 28, 28, 2), dtype=np.uint8)
        pixels[np.arange(len(labels)), :, :, colors.astype(np.int64)] = images[mine]
        domains.append(Domain(name, keys[mine], labels.astype(np.int64), pixels))
    return DomainDataset("ColoredMNIST", ("5 to 9", "0 to 4"), tuple(domains))


def rotated_mnist(folder: Path) -> DomainDataset:
    """Ten digits, each domain turned by another angle."""
    images, digits, keys = _shuffled(folder)
    domains = []
    for d, angle in enumerate(ANGLES):
        mine = slice(d, None, len(ANGLES))
        turned = [np.asarray(Image.fromarray(i).rotate(angle, Image.Resampling.BILINEAR)) for i in images[mine]]
        domains.append(Domain(str(angle), keys[mine], digits[mine], np.stack(turned)[..., None]))
    return DomainDataset("RotatedMNIST", tuple("0123456789"), tuple(domains))


def _shuffled(folder: Path) -> tuple[Pixels, IntArray, tuple[str, ...]]:
    """All images (70,000, 28, 28), their digits, and their places in MNIST as names, in one fixed random order."""
    train_images, train_labels, test_images, test_labels = (_read_idx(folder, name) for name in FILES)
    images = np.concatenate([train_images, test_images])
    digits = np.concatenate([train_labels, test_labels]).astype(np.int64)
    order = np.random.default_rng(SEED).permutation(len(images))
    return images[order], digits[order], tuple(f"{place:05d}" for place in order.tolist())


def _read_idx(folder: Path, name: str) -> npt.NDArray[np.uint8]:
    """An array in MNIST's own format: a four-byte magic number (the last byte counts dimensions), sizes, bytes."""
    path = next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None)
    if path is None:
        raise UsageError(f"no {name}[.gz] in {folder}; MNIST is the four files {', '.join(FILES)}")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        sizes = np.frombuffer(content, ">i4", count=content[3], offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise UsageError(f"{path} is damaged: {error}; get it again") from error
