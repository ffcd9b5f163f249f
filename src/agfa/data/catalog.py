"""The known datasets, one record each. Adding a benchmark means adding a record."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from agfa.data.arrange import by_location
from agfa.data.benchmark import Benchmark, File, Place, Settings, Source, data_folder
from agfa.data.digits import digits
from agfa.data.domains import DomainDataset
from agfa.data.mirrors import DOMAINNET_SOURCES, LILA, MNIST_SOURCES, tsinghua
from agfa.data.mnist import ANGLES, colored_mnist, rotated_mnist
from agfa.data.own import HUB, is_table, read_own, split
from agfa.errors import UsageError, unknown

__all__ = ["BENCHMARKS", "CATALOG", "data_folder", "load"]

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
        sources=(
            Source(
                (
                    File(
                        "hf:flwrlabs/pacs@394113073258ead631f617d2e13bb377c0715c4b/data/train-00000-of-00001.parquet",
                        "sha256:4fc041ee92eec6043fe6e2859e8bdd138e5f958bc621afd153879812cbe65ff5",
                        191395900,
                        "parquet",
                    ),
                )
            ),
            Source(
                tsinghua(
                    art_painting="46684292e979402b8d87",
                    cartoon="7bfa413b34ec4f4fa384",
                    photo="45f71386a668475d8b42",
                    sketch="4ba559535e4b4b6981e5",
                )
            ),
            Source(
                (
                    File(
                        "drive:1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd",
                        "md5:fd5db817f7cdafeef3bfd525aaf9b42e",
                        inside="kfold",
                    ),
                )
            ),
        ),
        folders=("PACS", "kfold"),
    ),
    Benchmark(
        name="VLCS",
        places=(  # bird, car, chair, dog, person
            Place("Caltech101", "C", (237, 123, 118, 67, 870), ("CALTECH", "Caltech")),
            Place("LabelMe", "L", (80, 1209, 88, 42, 1237), ("LABELME",)),
            Place("SUN09", "S", (20, 932, 1036, 30, 1264), ("SUN",)),
            Place("VOC2007", "V", (330, 699, 428, 420, 1499), ("PASCAL", "VOC")),
        ),
        classes=5,
        licence="those of its four sources; research",
        citation="Fang et al., Unbiased Metric Learning, ICCV 2013",
        settings=Settings(evaluate_every=50, swad_ratio=1.2),
        sources=(
            Source(
                (
                    File(
                        "drive:1skwblH1_okBwxWxmRsp9_qi15hyPpxg8",
                        "md5:8870171eba660927d9668f4e515928e4",
                        inside="VLCS",
                    ),
                )
            ),
            Source((File("drive:1yDuLrJdPSvMbTmpq-7XmwG0HnJengD-T", inside="*"),)),  # DomainBed's issue 165
        ),
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
        sources=(
            Source(
                (
                    File(
                        "hf:flwrlabs/office-home@2a083645e3177afbd91ba4fa2651238f8994d335/data/*.parquet",
                        kind="parquet",
                    ),
                )
            ),
            Source(
                tsinghua(
                    Art="6a006656b9a14567ade2",
                    Clipart="ae88aa31d2d7411dad79",
                    Product="f219b0ff35e142b3ab48",
                    Real_World="6c19f3f15bb24ed3951a",
                )
            ),
            Source(
                (
                    File(
                        "drive:1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC",
                        "md5:b1c14819770c4448fd5b6d931031c91c",
                        inside="OfficeHomeDataset_10072016",
                    ),
                )
            ),
        ),
        folders=("OfficeHome", "office_home", "OfficeHomeDataset_10072016"),
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
        sources=(
            Source(
                (
                    File(
                        LILA + "eccv_18_all_images_sm.tar.gz",
                        size=6492615601,
                        inside="eccv_18_all_images_sm",
                        into="images",
                    ),
                    File(
                        LILA + "eccv_18_annotations.tar.gz",
                        size=2997071,
                        inside="eccv_18_annotation_files",
                        into="annotations",
                    ),
                ),
                by_location,
            ),
        ),
        folders=("TerraIncognita", "terra_incognita"),
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
        sources=DOMAINNET_SOURCES,
        folders=("DomainNet", "domain_net"),
    ),
    Benchmark(
        name="ColoredMNIST",
        places=(Place("+90%", "0.1", 23334), Place("+80%", "0.2", 23333), Place("-90%", "0.9", 23333)),
        classes=2,
        licence="MNIST: CC BY-SA 3.0",
        citation="Arjovsky et al., Invariant Risk Minimization, 2019",
        settings=dataclasses.replace(MNIST_SETTINGS, channels=2),
        sources=MNIST_SOURCES,
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
        sources=MNIST_SOURCES,
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
CATALOG = {b.name.lower(): b for b in BENCHMARKS}


def benchmark(name: str) -> Benchmark:
    """The benchmark of that name, in whatever case it is written."""
    if name.lower() not in CATALOG:
        raise unknown("dataset", name, [b.name for b in BENCHMARKS])
    return CATALOG[name.lower()]


def known_as(data: str) -> Benchmark | None:
    """The benchmark that `data` names, unless there is a folder of that name."""
    return None if Path(data).expanduser().is_dir() else CATALOG.get(data.lower())


def load(data: str) -> tuple[DomainDataset, Settings]:
    """The dataset called `data`, or one's own there (agfa.data.own), and its settings. A folder wins over a name."""
    if known := known_as(data):
        return known.load(), known.settings
    path = Path(split(data)[0]).expanduser()
    bare = path.parent == Path() and not data.startswith(HUB) and not is_table(data)
    if bare and not path.exists():  # more likely a name than a path
        raise UsageError(f"no folder here and {unknown('dataset', data, [b.name for b in BENCHMARKS])}")
    return read_own(data), Settings()


def outline(data: str) -> tuple[DomainDataset, Settings]:
    """As `load` gives it; of a known dataset, which need not be on this machine, the names of its domains alone."""
    known = known_as(data)
    return (known.outline(), known.settings) if known else load(data)
