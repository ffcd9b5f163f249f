"""What a record of the catalog says: what a dataset holds, where it comes from, what it is trained with."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from agfa.data.domains import Domain, DomainDataset, from_folder
from agfa.data.store import cache_folder
from agfa.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """What to train with when nothing else is said; the defaults are the paper's for PACS-like photographs."""

    image_size: int = 224
    channels: int = 3
    augment: bool = True
    backbone: str = "resnet50"
    steps: int = 5000
    evaluate_every: int = 100
    batch_size: int = 32
    swad_ratio: float = 1.3
    hparams: Mapping[str, object] = field(default_factory=dict)


class Place(NamedTuple):
    """A domain of a benchmark: its folder's name, its heading in the paper, and how many images it has.

    `images` is one number, or one for each class in their order; `also` are other names that the folder has.
    """

    name: str
    title: str
    images: int | tuple[int, ...]
    also: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All its images."""
        return self.images if isinstance(self.images, int) else sum(self.images)


@dataclass(frozen=True)
class File:
    """One file to download, and what becomes of it.

    Args:
        url: http(s), "drive:ID" on Google Drive, or "hf:OWNER/NAME@REVISION/PATH" of a dataset on the Hugging Face
            hub, where PATH may be a pattern such as data/*.parquet.
        checksum: "md5:...", "sha256:..." or "sha512:...", or the beginning of one; None where none is known.
        size: bytes, where known.
        kind: a zip or tar, a Parquet file of images, or a file that is kept as it is.
        inside: the folder in the archive that is wanted; * where nobody says what it is called.
        into: the folder of the dataset that it goes to.
    """

    url: str
    checksum: str | None = None
    size: int | None = None
    kind: Literal["archive", "parquet", "file"] = "archive"
    inside: str = ""
    into: str = ""


@dataclass(frozen=True)
class Source:
    """Files that make up a dataset; `arrange` puts right what unpacking them leaves to do."""

    files: tuple[File, ...]
    arrange: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Benchmark:
    """A dataset known by name: what it holds, whose it is, how it is had and read, and what it is trained with.

    Without a `read` of its own it is a folder domain/class/image. `folders` are names that its folder in $AGFA_DATA
    may have beside its own; the first is where a download goes. `sources` are tried in order; an `embedded` one needs
    none.
    """

    name: str
    places: tuple[Place, ...]
    classes: int
    licence: str
    citation: str
    settings: Settings
    sources: tuple[Source, ...] = ()
    folders: tuple[str, ...] = ()
    read: Callable[[Path], DomainDataset] = from_folder
    embedded: bool = False

    def find(self) -> Path | None:
        """Its folder on this machine; None where there is none."""
        names = {name.lower() for name in (self.name, *self.folders)}
        root = data_folder()
        found = sorted(p for p in root.iterdir() if p.name.lower() in names and p.is_dir()) if root.is_dir() else []
        return found[0] if found else None

    @property
    def home(self) -> Path:
        """Where it belongs on this machine."""
        return data_folder() / (*self.folders, self.name)[0]

    @property
    def images(self) -> int:
        """How many images it has."""
        return sum(place.total for place in self.places)

    @property
    def download_size(self) -> int | None:
        """The bytes to download, where the size of every file of a source is known."""
        totals = ([file.size for file in source.files] for source in self.sources)
        return next((sum(filter(None, sizes)) for sizes in totals if None not in sizes), None)

    def load(self) -> DomainDataset:
        """The dataset, its domains in the paper's order under their usual names.

        Raises:
            UsageError: it is not on this machine, or lacks a domain.
        """
        folder = Path() if self.embedded else self.find()
        if folder is None:
            how = f"agfa data get {self.name}, or put it in {self.home} ($AGFA_DATA says where)"
            raise UsageError(f"{self.name} is not on this machine; {how}")
        return self.load_from(folder)

    def outline(self) -> DomainDataset:
        """The names of its domains, without an image: it need not be on this machine."""
        nothing = np.empty(0, dtype=np.int64)
        return DomainDataset(self.name, (), tuple(Domain(place.name, (), nothing, ()) for place in self.places))

    def load_from(self, folder: Path) -> DomainDataset:
        """The dataset in that folder, likewise."""
        dataset = self.read(folder)
        by_name = {domain.name: domain for domain in dataset.domains}
        domains = []
        for place in self.places:
            domain = next((by_name[name] for name in (place.name, *place.also) if name in by_name), None)
            if domain is None:
                raise UsageError(f"{folder} lacks {place.name!r} of {self.name}; it has {', '.join(by_name)}")
            domains.append(dataclasses.replace(domain, name=place.name))
        return DomainDataset(self.name, dataset.classes, tuple(domains), dataset.root)


def data_folder() -> Path:
    """Where known datasets lie: $AGFA_DATA, else `data` in the cache folder."""
    return Path(os.environ.get("AGFA_DATA", cache_folder() / "data")).expanduser()
