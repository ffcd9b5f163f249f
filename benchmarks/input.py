"""Images a second, from files to augmented minibatches: ours beside DomainBed's way, in one run, taking turns.

python benchmarks/input.py [FOLDER] [--images 960] [--repeats 5] [--cores 1]

Photographs are made of 227 x 227 pixels, as PACS' are, and of 1024 x 768; then come those of $AGFA_DATA/PACS, or of
FOLDER, when there are any. Seconds are those of processors, workers' included: what an image costs a core.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from agfa.benchmark.timing import Figure
from agfa.data.augment import Augmentation, crop_resize, flip_and_color, random_boxes
from agfa.data.batches import Part, training_batches
from agfa.data.domains import Domain, DomainDataset, from_folder
from agfa.data.store import Images, open_images

SIZE, DOMAINS, BATCH = 224, 3, 32  # pixels; images of each of the domains
SHARE = 192  # images of which the parts of each way are timed
BARS = {"first epoch": 1.0, "later epochs": 4.0, "decode and resize": 20.0}  # ours : DomainBed's, at least
CROP = transforms.RandomResizedCrop(SIZE, scale=(0.7, 1.0))
AUGMENT = [  # domainbed/datasets.py
    transforms.RandomHorizontalFlip(),
    transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
    transforms.RandomGrayscale(),
    transforms.ToTensor(),
    transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
]


class Plain(Dataset[tuple[torch.Tensor, int]]):
    """torchvision's ImageFolder, in effect: a file is decoded whenever it is asked for."""

    def __init__(self, files: list[Path]) -> None:
        self.files, self.transform = files, transforms.Compose([CROP, *AUGMENT])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.transform(decoded(self.files[i])), 0


def decoded(file: Path) -> Image.Image:
    """As torchvision's loader does."""
    with Image.open(file) as opened:
        return opened.convert("RGB")


def photograph(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A JPEG of colors that change slowly, with edges and grain: about as many bytes as one of PACS for its size."""
    coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = rng.integers(-12, 13, (height, width, 3))
    file = BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def make(folder: Path, images: int, width: int, height: int) -> None:
    """A folder domain/class/image of photographs."""
    rng = np.random.default_rng(0)
    few = [photograph(rng, width, height) for _ in range(60)]  # each under many names: what is measured is the same
    for i in range(images):
        place = folder / f"domain{i % DOMAINS}" / "class"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:05}.jpg").write_bytes(few[i % len(few)])


def some_of(dataset: DomainDataset, images: int) -> DomainDataset:
    """The first domains, and of each an equal number of images from here and there."""

    def thin(domain: Domain) -> Domain:
        n = images // DOMAINS
        if len(domain) < n:
            raise SystemExit(f"{domain.name} has {len(domain)} images; --images {images} asks for {n} of each domain")
        places = np.linspace(0, len(domain) - 1, n).astype(int)
        files = [domain.images[i] for i in places.tolist()]
        return Domain(domain.name, tuple(domain.keys[i] for i in places.tolist()), domain.labels[places], files)

    return DomainDataset(dataset.name, dataset.classes, tuple(thin(d) for d in dataset.domains[:DOMAINS]))


def cost(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of processors, those of ended child processes included; and of the clock on the wall."""
    before, began = _processors(), time.perf_counter()
    work()
    return _processors() - before, time.perf_counter() - began


def _processors() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def our_epoch(images: dict[str, Images], labels: dict[str, np.ndarray], steps: int) -> tuple[float, float]:
    """So many minibatches once they flow: as many are read ahead at the end as at the beginning."""
    parts = [Part(images[name], labels[name], np.arange(len(labels[name]))) for name in images]
    batches = training_batches(
        parts,
        batch_size=BATCH,
        image_size=SIZE,
        augmentation=Augmentation(),
        seed=0,
        first_step=0,
        device=torch.device("cpu"),
    )
    with closing(batches):
        for _ in range(5):
            next(batches)
        return cost(lambda: [next(batches) for _ in range(steps)])


def measure(dataset: DomainDataset, images: int, repeats: int, cores: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds an image of each way and part, of processors and on the wall, one pair a repetition."""
    files = [Path(str(file)) for domain in dataset.domains for file in domain.images]
    labels = {domain.name: domain.labels for domain in dataset.domains}
    loader = DataLoader(Plain(files), batch_size=BATCH * DOMAINS, shuffle=True, num_workers=cores, drop_last=True)
    some = files[:: max(1, len(files) // SHARE)][:SHARE]
    found: dict[str, list[tuple[float, float]]] = {}

    def note(what: str, n: int, *costs: tuple[float, float]) -> None:
        found.setdefault(what, []).append((sum(c[0] for c in costs) / n, sum(c[1] for c in costs) / n))

    for _ in range(repeats):
        note("DomainBed's, every epoch", images, cost(lambda: use(loader)))
        with tempfile.TemporaryDirectory() as cache:
            os.environ["AGFA_CACHE"] = cache
            building = cost(lambda: open_images(dataset, SIZE))
            stored = open_images(dataset, SIZE)
            epoch = our_epoch(stored, labels, images // (BATCH * DOMAINS))
            note("ours, first epoch", images, building, epoch)
            note("ours, later epochs", images, epoch)
            note("DomainBed's, decode and resize", len(some), cost(lambda: [CROP(decoded(file)) for file in some]))
            views = [image for name in stored for image in stored[name]]
            reading, coloring = parts_of(views[:: max(1, len(views) // SHARE)][:SHARE])
            note("ours, read and resize", SHARE, reading)
            note("ours, flip and color", SHARE, coloring)
    return found


def parts_of(views: list[torch.Tensor]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The cost of the two halves of our way for some images, a minibatch at a time."""
    generator = torch.Generator().manual_seed(0)
    batches = [views[i : i + BATCH] for i in range(0, len(views), BATCH)]
    pixels: list[torch.Tensor] = []

    def read() -> None:
        for batch in batches:
            sizes = torch.tensor([view.shape[1:] for view in batch])
            pixels.append(crop_resize(batch, random_boxes(sizes, Augmentation(), generator), SIZE))

    reading = cost(read)
    return reading, cost(lambda: [flip_and_color(x, Augmentation(), generator) for x in pixels])


def use(batches: Iterable[object]) -> None:
    """Go through them."""
    for _ in batches:
        pass


def show(what: str, found: dict[str, list[tuple[float, float]]], cores: int) -> None:
    """Print images a second, and every bar."""
    print(f"\n{what}")
    for name, seconds in found.items():
        core, wall = (Figure.of([1 / pair[i] for pair in seconds]) for i in (0, 1))
        print(
            f"  {name:32} {core.median:8.0f} images/s a core ({core.low:.0f} to {core.high:.0f}), "
            f"{wall.median:.0f} on {cores} by the wall's clock"
        )
    plain, resizing = (found[f"DomainBed's, {part}"] for part in ("every epoch", "decode and resize"))
    pairs = {
        "first epoch": (plain, found["ours, first epoch"]),
        "later epochs": (plain, found["ours, later epochs"]),
        "decode and resize": (resizing, found["ours, read and resize"]),
    }
    for name, (theirs, ours) in pairs.items():
        ratio = Figure.of([a / b for (a, _), (b, _) in zip(theirs, ours, strict=True)])
        verdict = "pass" if ratio.median >= BARS[name] else "FAIL"
        print(
            f"  {name:20} {ratio.median:5.1f} ({ratio.low:.1f} to {ratio.high:.1f}) times DomainBed's, "
            f"wanted {BARS[name]:g}: {verdict}"
        )


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="domain/class/image")
    parser.add_argument("--images", type=int, default=960, help="in an epoch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    args = parser.parse_args()
    per_epoch = BATCH * DOMAINS
    images = max(1, args.images // per_epoch) * per_epoch
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    torch.set_num_threads(args.cores)
    folder = args.folder or Path(os.environ.get("AGFA_DATA", ""), "PACS")
    with tempfile.TemporaryDirectory() as made:
        sources = {}
        if args.folder is None:
            for width, height in ((227, 227), (1024, 768)):
                make(Path(made, f"{width}"), images, width, height)
                sources[f"JPEGs made here, {width} x {height}"] = Path(made, f"{width}")
        if folder.is_dir():
            sources[folder.name] = folder
        for name, root in sources.items():
            dataset = some_of(from_folder(root), images)
            show(
                f"{name}: {images} images to {SIZE} px",
                measure(dataset, images, args.repeats, args.cores),
                args.cores,
            )


if __name__ == "__main__":
    main()
