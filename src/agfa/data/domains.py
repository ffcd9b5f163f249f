"""What every dataset is: a few named domains that share their classes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from agfa.data.sources import Files, Source
from agfa.errors import UsageError, unknown

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Domain:
    """One source of images.

    `keys` name the images for good (a relative path, an index): splits depend on nothing else.
    `images` are image files (agfa.data.sources), or pixels of shape (n, height, width, channels) for datasets
    made in memory.
    `weights` say how often each is drawn in training, relative to the domain's others; without them all alike.
    """

    name: str
    keys: tuple[str, ...]
    labels: IntArray
    images: Sequence[Source] | Pixels
    weights: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class DomainDataset:
    """Domains in their order, and the classes that the labels index."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    root: Path | None = None  # the folder domain/class/image that it was read from, if it was

    def __getitem__(self, name: str) -> Domain:
        for domain in self.domains:
            if domain.name == name:
                return domain
        raise unknown(f"domain of {self.name}", name, self.domain_names)

    @property
    def domain_names(self) -> tuple[str, ...]:
        """The domains' names, in order."""
        return tuple(domain.name for domain in self.domains)

    def counts(self) -> IntArray:
        """Images per domain (rows) and class (columns)."""
        return np.stack([np.bincount(d.labels, minlength=len(self.classes)) for d in self.domains])


def image_suffixes() -> frozenset[str]:
    """The endings of file names that Pillow can read."""
    kinds = Image.registered_extensions()  # fills Image.OPEN too
    return frozenset(end for end, kind in kinds.items() if kind in Image.OPEN)


def visible_folders(folder: Path) -> list[Path]:
    """The folders in `folder`, sorted, hidden ones left out."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def visible_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Every (parent, name) of a file under `folder`, at any depth, hidden ones left out."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from ((parent, name) for name in files if not name.startswith("."))


def is_image(name: str, suffixes: frozenset[str]) -> bool:
    """Whether a file's name ends like an image's."""
    return os.path.splitext(name)[1].lower() in suffixes  # noqa: PTH122


def image_files(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    """Every image file under `folder`, at any depth, sorted, hidden ones left out."""
    return sorted(Path(parent, name) for parent, name in visible_files(folder) if is_image(name, suffixes))


def _name(parent: str, file: str, folder: Path) -> str:
    """What a file is called in a folder above it: as relative_to does, but fast enough for millions."""
    return f"{parent}/{file}"[len(str(folder)) + 1 :].replace(os.sep, "/")


def from_folder(root: Path) -> DomainDataset:
    """The dataset in a folder `domain/class/image`, images nested to any depth.

    Raises:
        UsageError: there is nothing to read. What is merely odd (an empty class, say) is left to
            `agfa.data.check`, which sees the whole.
    """
    if not root.is_dir():
        raise UsageError(f"no folder {root}; --data takes a folder domain/class/image, or a known dataset's name")
    suffixes = image_suffixes()
    folders = visible_folders(root)
    classes = tuple(sorted({c.name for d in folders for c in visible_folders(d)}))
    domains = []
    for folder in folders:
        keys: list[str] = []
        labels: list[IntArray] = []
        for label, name in enumerate(classes):
            found = sorted(
                _name(parent, file, folder)
                for parent, file in visible_files(folder / name)
                if is_image(file, suffixes)
            )
            keys += found
            labels.append(np.full(len(found), label, dtype=np.int64))
        if keys or visible_folders(folder):
            names = tuple(keys)
            domains.append(Domain(folder.name, names, np.concatenate(labels), Files(folder, names)))
    if not any(len(domain) for domain in domains):
        raise UsageError(f"no images in {root}; they are expected as {root}/DOMAIN/CLASS/IMAGE")
    return DomainDataset(root.resolve().name, classes, tuple(domains), root)
