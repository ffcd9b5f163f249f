"""The known datasets, one record each: where they come from and the settings they are trained with."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from agfa.data.digits import digits
from agfa.data.domains import DomainDataset, from_folder
from agfa.data.mnist import ANGLES, colored_mnist, rotated_mnist
from agfa.data.own import HUB, is_table, read_own, split
from agfa.data.store import cache_folder
from agfa.errors import UsageError, unknown


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
class Benchmark:
    """A dataset known by name: what it holds, whose it is, how it is read and what it is trained with.

    Without a `read` of its own it is a folder domain/class/image. `folders` are names that its folder in $AGFA_DATA
    may have, beside its own; an `embedded` one needs no folder.
    """

    name: str
    places: tuple[Place, ...]
    classes: int
    licence: str
    citation: str
    settings: Settings
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
    def images(self) -> int:
        """How many images it has."""
        return sum(place.total for place in self.places)

    def load(self) -> DomainDataset:
        """The dataset, its domains in the paper's order under their usual names.

        Raises:
            UsageError: it is not on this machine, or lacks a domain.
        """
        folder = Path() if self.embedded else self.find()
        if folder is None:
            wanted = data_folder() / (*self.folders, self.name)[0]
            raise UsageError(f"{self.name} is not on this machine; put it in {wanted} ($AGFA_DATA says where)")
        dataset = self.read(folder)
        by_name = {domain.name: domain for domain in dataset.domains}
        domains = []
        for place in self.places:
            domain = next((by_name[name] for name in (place.name, *place.also) if name in by_name), None)
            if domain is None:
                raise UsageError(f"{folder} lacks {place.name!r} of {self.name}; it has {', '.join(by_name)}")
            domains.append(dataclasses.replace(domain, name=place.name))
        return DomainDataset(self.name, dataset.classes, tuple(domains))


MNIST_SETTINGS = Settings(
    image_size=28, augment=False, backbone="convnet", batch_size=64, hparams={"lr": 1e-3}, channels=1
)

BENCHMARKS = (
    Benchmark(
        name="PACS",
        places=(  # dog, elephant, giraffe, guitar, horse, house, person
            Place("art_painting", "Art", (379, 255, 285, 184, 201, 295, 449)),
            Place("cartoon", "Cartoon", (389, 457, 346, 135, 324, 288, 405)),
            Place("photo", "Photo", (189, 202, 182, 186, 199, 280, 432)),
            Place("sketch", "Sketch", (772, 740, 753, 608, 816, 80, 160)),
        ),
        classes=7,
        licence="none stated; research",
        citation="Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017",
        settings=Settings(),
        folders=("kfold",),
    ),
    Benchmark(
        name="VLCS",
        places=(
            Place("Caltech101", "C", 1415, ("CALTECH", "Caltech")),
            Place("LabelMe", "L", 2656, ("LABELME",)),
            Place("SUN09", "S", 3282, ("SUN",)),
            Place("VOC2007", "V", 3376, ("PASCAL", "VOC")),
        ),
        classes=5,
        licence="those of its four sources; research",
        citation="Fang et al., Unbiased Metric Learning, ICCV 2013",
        settings=Settings(evaluate_every=50, swad_ratio=1.2),
    ),
    Benchmark(
        name="OfficeHome",
        places=(
            Place("Art", "Art", 2427),
            Place("Clipart", "Clipart", 4365),
            Place("Product", "Product", 4439),
            Place("Real World", "Real", 4357, ("Real", "RealWorld", "Real_World")),
        ),
        classes=65,
        licence="non-commercial research",
        citation="Venkateswara et al., Deep Hashing Network for Unsupervised Domain Adaptation, CVPR 2017",
        settings=Settings(hparams={"alpha": 0.2}),
        folders=("office_home", "OfficeHomeDataset_10072016"),
    ),
    Benchmark(
        name="TerraIncognita",
        places=(
            Place("location_100", "L100", 4741, ("L100",)),
            Place("location_38", "L38", 9736, ("L38",)),
            Place("location_43", "L43", 3970, ("L43",)),
            Place("location_46", "L46", 5883, ("L46",)),
        ),
        classes=10,
        licence="CDLA-Permissive-1.0",
        citation="Beery et al., Recognition in Terra Incognita, ECCV 2018",
        settings=Settings(),
        folders=("terra_incognita",),
    ),
    Benchmark(
        name="DomainNet",
        places=(  # without the near-duplicates that DomainBed's list names
            Place("clipart", "Clipart", 48129, ("clip",)),
            Place("infograph", "Infograph", 51605, ("info",)),
            Place("painting", "Painting", 72266, ("paint",)),
            Place("quickdraw", "Quickdraw", 172500, ("quick",)),
            Place("real", "Real", 172947),
            Place("sketch", "Sketch", 69128),
        ),
        classes=345,
        licence="non-commercial research",
        citation="Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019",
        settings=Settings(steps=30000, evaluate_every=500),
        folders=("domain_net",),
    ),
    Benchmark(
        name="ColoredMNIST",
        places=(Place("+90%", "0.1", 23334), Place("+80%", "0.2", 23333), Place("-90%", "0.9", 23333)),
        classes=2,
        licence="MNIST: CC BY-SA 3.0",
        citation="Arjovsky et al., Invariant Risk Minimization, 2019",
        settings=dataclasses.replace(MNIST_SETTINGS, channels=2),
        folders=("MNIST",),
        read=colored_mnist,
    ),
    Benchmark(
        name="RotatedMNIST",
        places=tuple(Place(str(angle), str(angle), 11667 if angle < 60 else 11666) for angle in ANGLES),
        classes=10,
        licence="MNIST: CC BY-SA 3.0",
        citation="Ghifary et al., Domain Generalization for Object Recognition, ICCV 2015",
        settings=MNIST_SETTINGS,
        folders=("MNIST",),
        read=rotated_mnist,
    ),
    Benchmark(
        name="digits",
        places=(
            Place("mnist", "MNIST", 2500),
            Place("optdigits", "Optdigits", 1797),
            Place("print", "Print", 2000),
            Place("mnist_m", "MNIST-M", 2500),
        ),
        classes=10,
        licence="of its parts: CC BY-SA 3.0 (MNIST), CC BY 4.0 (optdigits, photographs)",
        citation="agfa; LeCun et al. 1998, Alpaydin and Kaynak 1998",
        settings=Settings(
            image_size=16,  # a ConvNet learns digits three times as fast as at 32, and as well
            augment=False,
            backbone="convnet",
            steps=900,
            evaluate_every=50,
            batch_size=16,
            hparams={"lr": 1e-3},
        ),
        read=lambda _: digits(),
        embedded=True,
    ),
)
CATALOG = {benchmark.name.lower(): benchmark for benchmark in BENCHMARKS}


def load(data: str) -> tuple[DomainDataset, Settings]:
    """The dataset called `data`, or one's own there (agfa.data.own), and its settings. A folder wins over a name."""
    path = Path(split(data)[0]).expanduser()
    if data.lower() in CATALOG and not path.is_dir():
        benchmark = CATALOG[data.lower()]
        return benchmark.load(), benchmark.settings
    bare = path.parent == Path() and not data.startswith(HUB) and not is_table(data)
    if bare and not path.exists():  # more likely a name than a path
        raise UsageError(f"no folder here and {unknown('dataset', data, [b.name for b in BENCHMARKS])}")
    return read_own(data), Settings()


def data_folder() -> Path:
    """Where known datasets lie: $AGFA_DATA, else `data` in the cache folder."""
    return Path(os.environ.get("AGFA_DATA", cache_folder() / "data")).expanduser()
