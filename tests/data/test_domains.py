"""A folder domain/class/image becomes a dataset, whatever else lies in it and in whatever order it is listed."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agfa.data import catalog
from agfa.data.domains import DomainDataset, from_folder, image_suffixes
from agfa.errors import UsageError
from support import listing


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (3, 3)).save(path, "png")
    return path


def listed(dataset: DomainDataset) -> dict[str, list[tuple[str, str]]]:
    return {d.name: [(dataset.classes[y], k) for y, k in zip(d.labels, d.keys, strict=True)] for d in dataset.domains}


def test_a_plain_folder(tiny: Path) -> None:
    dataset = from_folder(tiny)
    assert dataset.name == "tiny"
    assert dataset.classes == ("cross", "left", "top")
    assert dataset.domain_names == ("ink", "paper", "sky")
    assert (dataset.counts() == 10).all()
    assert dataset["sky"].keys[:2] == ("cross/00.jpg", "cross/01.png")
    assert dataset["sky"].images[11] == tiny / "sky" / "left" / "01.png"
    assert dataset["sky"].labels.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    with pytest.raises(UsageError, match=r"unknown domain of tiny 'ski'; did you mean 'sky'\?"):
        dataset["ski"]


def test_what_is_found_and_what_is_not(tmp_path: Path) -> None:
    root = tmp_path / "mixed"
    for name in (
        "d/c/a.PNG",
        "d/c/deep/er/b.Jpg",
        "d/c/with space.jpeg",
        "d/c/ünï.webp",
        "d/other/c.tif",
        "e/c/d.png",
    ):
        picture(root / name)
    for name in (
        "d/c/.hidden.png",
        "d/c/.git/x.png",
        "d/.trash/x.png",
        ".cache/c/x.png",
        "__MACOSX.png",
        "d/loose.png",
        "d/c/notes.txt",
        "d/c/Thumbs.db",
        "d/c/noending",
        "d/c/archive.png.zip",
    ):
        picture(root / name)
    (root / "empty").mkdir()
    dataset = from_folder(root)
    assert listed(dataset) == {
        "d": [
            ("c", "c/a.PNG"),
            ("c", "c/deep/er/b.Jpg"),
            ("c", "c/with space.jpeg"),
            ("c", "c/ünï.webp"),
            ("other", "other/c.tif"),
        ],
        "e": [("c", "c/d.png")],
    }


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "root" / "d").mkdir(parents=True)
    (tmp_path / "root" / "d" / "c").symlink_to(tmp_path / "elsewhere")
    assert listed(from_folder(tmp_path / "root")) == {"d": [("c", "c/a.png")]}


def test_the_order_of_the_file_system_does_not_matter(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = from_folder(tiny)
    walk, iterdir = os.walk, Path.iterdir
    rng = random.Random(0)

    def shuffled_walk(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for parent, folders, files in walk(*args, **kwargs):
            rng.shuffle(folders)
            rng.shuffle(files)
            yield parent, folders, files

    def shuffled_iterdir(self: Path) -> Iterator[Path]:
        found = list(iterdir(self))
        rng.shuffle(found)
        return iter(found)

    monkeypatch.setattr(os, "walk", shuffled_walk)
    monkeypatch.setattr(Path, "iterdir", shuffled_iterdir)
    for _ in range(5):
        shuffled = from_folder(tiny)
        assert listed(shuffled) == listed(straight)
        assert listing(shuffled) == listing(straight)
        assert [d.images for d in shuffled.domains] == [d.images for d in straight.domains]


def test_a_dataset_is_its_names_classes_and_domains_wherever_it_lies(tiny: Path) -> None:
    seen = {listing(from_folder(tiny))}
    shutil.copytree(tiny, tiny.parent / "elsewhere" / "tiny")
    seen.add(listing(from_folder(tiny.parent / "elsewhere" / "tiny")))
    assert len(seen) == 1  # the place does not count
    image = tiny / "ink" / "top" / "00.jpg"
    changes = [
        lambda: image.rename(image.with_name("x.jpg")),
        lambda: image.with_name("x.jpg").rename(tiny / "ink" / "left" / "x.jpg"),
        lambda: (tiny / "ink").rename(tiny / "inc"),
        lambda: picture(tiny / "sky" / "zigzag" / "a.png"),
    ]
    for number, change in enumerate(changes, start=2):
        change()
        seen.add(listing(from_folder(tiny)))
        assert len(seen) == number


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        from_folder(tmp_path / "missing")
    with pytest.raises(UsageError, match="no folder"):
        from_folder(picture(tmp_path / "file.png"))
    (tmp_path / "d" / "c").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"no images in .* expected as .*/DOMAIN/CLASS/IMAGE"):
        from_folder(tmp_path / "d")
    with pytest.raises(UsageError, match="no images in"):
        from_folder(picture(tmp_path / "flat" / "a.png").parent)


def test_counts_have_a_column_for_every_class(tmp_path: Path) -> None:
    picture(tmp_path / "r" / "a" / "one" / "x.png")
    picture(tmp_path / "r" / "b" / "two" / "x.png")
    np.testing.assert_array_equal(from_folder(tmp_path / "r").counts(), [[1, 0], [0, 1]])


def test_suffixes_are_known_from_the_first_call() -> None:
    """Pillow registers most formats late: a new process must know them all."""
    code = "from agfa.data.domains import image_suffixes; print(*image_suffixes())"
    first = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp", ".ppm"} <= set(first)
    assert set(first) == image_suffixes()
    assert not {".pdf", ".txt", ".npy"} & set(first)


def test_the_catalog_takes_names_and_folders(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, settings = catalog.load(str(tiny))
    assert (dataset.name, settings.backbone, settings.image_size) == ("tiny", "resnet50", 224)
    assert catalog.load("Digits")[0].name == "digits"
    monkeypatch.chdir(tiny.parent)
    assert catalog.load("tiny")[0].domain_names == dataset.domain_names
    with pytest.raises(UsageError, match="no folder here and unknown dataset 'digts'; did you mean 'digits'"):
        catalog.load("digts")
    with pytest.raises(UsageError, match="no folder there/digts"):
        catalog.load("there/digts")
