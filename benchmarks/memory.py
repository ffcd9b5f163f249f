"""The memory that training takes when its images fill a large store: by default 50 GB, more than most machines have.

python benchmarks/memory.py [--gigabytes 50] [--steps 20]

The store is a sparse file: its images are black, but mapped, read, cropped, augmented and evaluated as any. The
network is a small one, for what grows with the data is of interest. Anonymous memory is what the system cannot take
back; pages of the store that happen to be in memory are not.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from agfa import train
from agfa.data import store
from agfa.data.store import MARGIN

SIZE, DOMAINS, CLASSES = 224, 3, 7
HEIGHT = round(MARGIN * SIZE)
WIDTH = HEIGHT * 4 // 3
LINKS = 30_000  # names that one file is given
LIMIT = 2.0  # GB


def name_images(folder: Path, images: int) -> None:
    """A folder domain/class/image of so many names, and few files."""
    for i in range(images):
        place = folder / f"domain{i % DOMAINS}" / f"class{i // DOMAINS % CLASSES}"
        if i < DOMAINS * CLASSES:
            place.mkdir(parents=True)
        if i % LINKS == 0:
            one = folder / f".{i}.jpg"
            Image.new("RGB", (WIDTH, HEIGHT)).save(one)
        (place / f"{i:07}.jpg").hardlink_to(one)


def lay_out(images: int, folder: Path) -> None:
    """A store of so many images, all of it a hole in a file."""
    folder.mkdir(parents=True)
    with (folder / "pixels.u8").open("wb") as file:
        file.truncate(images * HEIGHT * WIDTH * 3)
    np.save(folder / "sizes.npy", np.tile([HEIGHT, WIDTH], (images, 1)))


def memory(kind: str) -> float:
    """GB of this process's memory, RssAnon or RssFile."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{kind}:")) * 1024 / 1e9


@contextmanager
def watched(peaks: dict[str, float]) -> Iterator[None]:
    """Keep the most that the process has of each kind, looking every 10 ms."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            for kind in ("RssAnon", "RssFile"):
                peaks[kind] = max(peaks.get(kind, 0), memory(kind))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def measure(gigabytes: float, steps: int, where: Path) -> tuple[float, float]:
    """GB of anonymous memory, at most: before training, and in it."""
    images = round(gigabytes * 1e9 / (HEIGHT * WIDTH * 3))
    os.environ["AGFA_CACHE"] = str(where / "cache")
    name_images(where / "data", images)
    build, store._build = store._build, lambda *given: lay_out(images, next(x for x in given if isinstance(x, Path)))
    peaks: dict[str, float] = {}
    try:
        importlib.import_module("agfa.training.trainer")  # what torch takes is there before
        before = memory("RssAnon")
        with watched(peaks):
            train(
                data=str(where / "data"),
                algorithm="erm",
                averaging="none",
                backbone="test_resnet",
                weights="none",
                image_size=SIZE,
                batch_size=32,
                steps=steps,
                evaluate_every=steps,
                val_fraction=min(0.2, 7300 / images),  # more than an evaluation keeps in memory
                out=where / "run",
            )
    finally:
        store._build = build
    print(
        f"{images} images, {gigabytes:g} GB: anonymous memory {before:.2f} GB before training, "
        f"at most {peaks['RssAnon']:.2f} GB in it; of the store, {peaks['RssFile']:.2f} GB were in memory at most"
    )
    return before, peaks["RssAnon"]


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=50)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _, most = measure(args.gigabytes, args.steps, Path(folder))
    print(f"under {LIMIT:g} GB: {'pass' if most < LIMIT else 'FAIL'}")


if __name__ == "__main__":
    main()
