"""All that is wrong with a folder is found in one pass, and training refuses what `check` calls fatal."""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agfa.data.check import check, require_trainable
from agfa.data.domains import from_folder
from agfa.data.splits import Roles, assign_roles
from agfa.errors import UsageError
from support import CLASSES, Agfa, make_images


def found(root: Path) -> list[str]:
    return [str(problem).removeprefix(f"{root}/") for problem in check(from_folder(root))]


def test_nothing_is_wrong(tiny: Path) -> None:
    assert found(tiny) == []


def test_everything_at_once(tiny: Path) -> None:
    shutil.rmtree(tiny / "paper" / "left")
    shutil.copytree(tiny / "sky" / "top", tiny / "sky" / "zigzag")
    (tiny / "ink" / "nothing").mkdir()
    (tiny / "ink" / "top" / "01.png").write_text("text")
    cut = tiny / "sky" / "left" / "02.jpg"
    cut.write_bytes(cut.read_bytes()[:-100])
    (tiny / "void" / "top").mkdir(parents=True)
    what = found(tiny)
    assert what[0] == "tiny/void: has no images; add some, or remove the folder"
    assert "tiny/paper: has no images of class 'left'; add some" in what
    assert "tiny: class 'zigzag' is in 'sky' alone; add it to the other domains, or remove it" in what
    assert "tiny: class 'nothing' is empty in every domain; add images, or remove its folders" in what
    assert "ink/top/01.png: not an image; mend it or remove it from 'ink'" in what
    assert sum(line.startswith("sky/left/02.jpg: ") for line in what) == 1
    assert sum("has the same bytes as" in line and "of another class" in line for line in what) == 10
    assert len(what) == 16


def picture(path: Path, seed: int = 0, **options: Any) -> Path:
    """A file of noise, which looks like no other of another seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng((7, seed)).integers(0, 256, (20, 24, 3), np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def save(image: Image.Image, path: Path, **options: Any) -> None:
    image.save(path, **options)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def fill(root: Path, name: str, counts: dict[str, int]) -> None:
    """A class with so many images in each domain, all different."""
    for d, (domain, n) in enumerate(counts.items()):
        (root / domain / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            picture(root / domain / name / f"{i}.png", seed=len(name) * 1000 + d * 100 + i)


def ramp(low: float, high: float, dtype: str) -> Image.Image:
    return Image.fromarray(np.linspace(low, high, 480).reshape(20, 24).astype(dtype))


def bomb(path: Path) -> None:
    """The header of a PNG with 3.6 billion pixels in the place of its own."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    content = picture(path).read_bytes()
    path.write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])


FRAMES = [Image.effect_noise((24, 20), s) for s in (20, 60)]
ALL = {"ink": 6, "paper": 6, "sky": 6, "sky ": 6}
# what is wrong: how it comes about, the file or folder that is to be named, part of what is to be said
PLANTED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "text": (lambda r: (r / "ink/top/t.png").write_text("text"), "ink/top/t.png", "not an image"),
    "a web page": (lambda r: (r / "ink/top/h.jpg").write_text("<html>"), "ink/top/h.jpg", "not an image"),
    "nothing in it": (lambda r: (r / "ink/top/e.jpg").write_bytes(b""), "ink/top/e.jpg", "is empty, 0 bytes"),
    "cut JPEG": (lambda r: cut(picture(r / "ink/top/c.jpg", 1)), "ink/top/c.jpg", "runcated"),
    "cut PNG": (lambda r: cut(picture(r / "ink/top/c.png", 2)), "ink/top/c.png", "truncated"),
    "cut WebP": (lambda r: cut(picture(r / "ink/top/c.webp", 3)), "ink/top/c.webp", ""),
    "bomb": (lambda r: bomb(r / "ink/top/b.png"), "ink/top/b.png", "decompression bomb"),
    "link to nowhere": (lambda r: (r / "ink/top/l.png").symlink_to("no"), "ink/top/l.png", "No such file"),
    "pipe": (lambda r: os.mkfifo(r / "ink/top/p.png"), "ink/top/p.png", "not a file"),
    "copied to another domain": (
        lambda r: shutil.copy(r / "ink/top/01.png", r / "paper/top/x.png"),
        "paper/top/x.png",
        "same bytes as .../ink/top/01.png of another domain",
    ),
    "copied to another domain and class": (
        lambda r: shutil.copy(r / "ink/top/03.png", r / "paper/left/x.png"),
        "paper/left/x.png",
        "same bytes as .../ink/top/03.png of another domain, as 'left' and 'top'",
    ),
    "copied to another class": (
        lambda r: shutil.copy(r / "sky/left/01.png", r / "sky/top/x.png"),
        "sky/top/x.png",
        "same bytes as .../sky/left/01.png of another class",
    ),
    "12 bits in 16": (lambda r: save(ramp(0, 4000, "<u2"), r / "ink/top/12.tif"), "ink/top/12.tif", "0 to 4000 of"),
    "floats up to 1": (lambda r: save(ramp(0, 1, "f4"), r / "ink/top/f.tif"), "ink/top/f.tif", "0 to 1 of 0..255"),
    "one colour": (
        lambda r: save(Image.new("RGB", (24, 20), "red"), r / "ink/top/o.png"),
        "ink/top/o.png",
        "one colour all over",
    ),
    "transparent": (
        lambda r: save(Image.merge("LA", (FRAMES[0], Image.new("L", (24, 20)))), r / "ink/top/n.png"),
        "ink/top/n.png",
        "one colour all over",
    ),
    "tiny": (lambda r: save(FRAMES[0].resize((4, 4)), r / "ink/top/s.png"), "ink/top/s.png", "only 4 x 4 pixels"),
    "slender": (
        lambda r: save(FRAMES[0].resize((500, 9)), r / "ink/top/w.png"),
        "ink/top/w.png",
        "very slender, 500 x 9",
    ),
    "frames": (
        lambda r: save(FRAMES[0], r / "ink/top/g.gif", save_all=True, append_images=FRAMES[1:]),
        "ink/top/g.gif",
        "several frames",
    ),
    "empty class": (lambda r: fill(r, "nothing", dict.fromkeys(ALL, 0)), "tiny", "class 'nothing' is empty in every"),
    "class of one domain": (lambda r: fill(r, "alone", {"sky": 6}), "tiny", "class 'alone' is in 'sky' alone"),
    "class missing": (lambda r: fill(r, "gap", ALL | {"sky": 0}), "tiny/sky", "no images of class 'gap'"),
    "few of a class": (lambda r: fill(r, "rare", ALL | {"ink": 2}), "tiny/ink", "only 2 images of class 'rare'"),
    "domain of two images": (
        lambda r: [picture(r / "small" / c / "0.png", 50 + i) for i, c in enumerate(CLASSES[:2])],
        "tiny/small",
        "has only 2 images in all",
    ),
    "empty domain": (lambda r: (r / "void" / "top").mkdir(parents=True), "tiny/void", "has no images"),
    "domains alike": (lambda r: None, "tiny", "domains 'sky' and 'sky ' differ only by case"),
    "no folders of classes": (lambda r: (r / "notes").mkdir(), "notes", "no folders of classes"),
    "in no domain": (lambda r: picture(r / "a.png", 4), "", "1 image in no domain, a.png the first"),
    "in no class": (lambda r: picture(r / "sky" / "a.png", 5), "sky", "1 image in no class, a.png the first"),
    "not named an image": (
        lambda r: (r / "sky" / "top" / "a.jpg_old").write_text(""),
        "sky",
        "1 file not named like an image, top/a.jpg_old the first",
    ),
}
# a domain of two images in two classes lacks the others, and has one of each: that is true too
FOLLOWS = [("tiny/small", f"no images of class {c!r}") for c in ("top", "gap", "rare")]
FOLLOWS += [("tiny/small", f"only 1 image of class {c!r}") for c in CLASSES[:2]]


def test_everything_that_is_planted_is_found_and_nothing_else(tiny: Path) -> None:
    make_images(tiny.parent / "more")  # the same classes for a fourth domain, in other pixels
    for path in (tiny.parent / "more" / "sky").rglob("*.*"):
        place = tiny / "sky " / path.relative_to(tiny.parent / "more" / "sky")
        place.parent.mkdir(parents=True, exist_ok=True)
        save(Image.open(path).transpose(Image.Transpose.ROTATE_180), place)
    assert [(p.what, p.fatal) for p in check(from_folder(tiny))] == [
        ("domains 'sky' and 'sky ' differ only by case or spaces", False)
    ]
    for plant, _, _ in PLANTED.values():
        plant(tiny)
    missing = [(where, what) for _, where, what in PLANTED.values()] + FOLLOWS
    strange = []
    for problem in check(from_folder(tiny)):
        where = problem.where.removeprefix(str(tiny)).removeprefix("/")
        said = problem.what.replace(str(tiny), "...")
        match = next((planted for planted in missing if planted[0] == where and planted[1] in said), None)
        missing.remove(match) if match else strange.append((where, said))
    assert (missing, strange) == ([], [])


def test_one_domain_is_no_reason_to_refuse(tiny: Path) -> None:
    shutil.rmtree(tiny / "ink")
    shutil.rmtree(tiny / "sky")
    (problem,) = check(from_folder(tiny))
    assert "one domain only, 'paper'" in problem.what
    assert not problem.fatal
    dataset = from_folder(tiny)
    require_trainable(dataset, assign_roles(dataset, (), ()), allow_missing_classes=False)


def test_progress_counts_every_file(tiny: Path) -> None:
    seen = []
    check(from_folder(tiny), lambda done, total: seen.append((done, total)))
    assert seen == [(n, 90) for n in range(1, 91)]


def test_what_check_calls_fatal_stops_training(tiny: Path) -> None:
    roles = Roles(("ink", "paper"), ("sky",))
    require_trainable(from_folder(tiny), roles, allow_missing_classes=False)
    shutil.rmtree(tiny / "paper" / "left")
    with pytest.raises(UsageError, match=r"tiny/paper: has no images of class 'left'.*--allow-missing-classes"):
        require_trainable(from_folder(tiny), roles, allow_missing_classes=False)
    require_trainable(from_folder(tiny), roles, allow_missing_classes=True)


def test_a_class_that_no_source_has_is_always_refused(tiny: Path) -> None:
    shutil.copytree(tiny / "sky" / "top", tiny / "sky" / "zigzag")
    with pytest.raises(UsageError, match="class 'zigzag' is in no source domain, only in sky"):
        require_trainable(from_folder(tiny), Roles(("ink", "paper"), ("sky",)), allow_missing_classes=True)


def test_a_missing_class_can_be_trained_without(train: Agfa, tiny: Path) -> None:
    shutil.rmtree(tiny / "paper" / "left")
    assert train(target="sky", out="run").status == 2
    assert train(target="sky", out="run", allow_missing_classes=True).status == 0


def test_the_command(agfa: Agfa, tiny: Path) -> None:
    ended = agfa("data", "check", tiny)
    assert (ended.status, ended.err) == (0, "")
    assert "no problems" in ended.out
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["ink", "30", "10", "10", "10"] in rows
    (tiny / "ink" / "top" / "01.png").write_text("text")
    shutil.rmtree(tiny / "paper" / "left")
    ended = agfa("data", "check", tiny)
    assert (ended.status, ended.err) == (1, "")
    assert "2 problems, 2 of them would stop training" in ended.out
    assert "01.png" in ended.out
    assert "has no images of class 'left'" in ended.out


def test_names_that_are_no_text(agfa: Agfa, train: Agfa, tiny: Path) -> None:
    """Bytes that are no UTF-8, from another system: read like any other, and printed with a mark."""
    name = os.fsdecode(b"a\xffb.png")
    try:
        (tiny / "ink" / "top" / name).write_text("text")
    except OSError:
        pytest.skip("this file system takes no such name")
    ended = agfa("data", "check", tiny)
    assert (ended.status, ended.err) == (1, "")
    assert "ink/top/a\ufffdb.png" in ended.out
    assert "\ufffdb.png (not an image)" in train(target="sky").error
    picture(tiny / "ink" / "top" / name)
    assert train(target="sky").status == 0


def test_what_is_odd_but_shows_something_passes(tiny: Path) -> None:
    empty = Image.new("L", (24, 20))
    save(Image.merge("RGB", (ramp(0, 255, "u1"), empty, empty)), tiny / "ink" / "top" / "red.png")
    save(ramp(0, 65535, "<u2"), tiny / "ink" / "top" / "deep.tif")
    save(ramp(0, 255, "f4"), tiny / "ink" / "top" / "float.tif")
    picture(tiny / "ink" / "top" / "copy.png")
    shutil.copy(tiny / "ink" / "top" / "copy.png", tiny / "ink" / "top" / "again.png")
    assert found(tiny) == []


def test_too_few_images_to_hold_any_out(agfa: Agfa, train: Agfa, tiny: Path) -> None:
    for path in sorted((tiny / "ink").rglob("*.*")):
        if path.stem != "00":
            path.unlink()
    for name in ("left", "top"):
        shutil.rmtree(tiny / "ink" / name)
    assert "has only 1 image in all" in agfa("data", "check", tiny).out
    assert "too few to hold out" in train(target="sky", allow_missing_classes=True).error


def test_embedded_data_is_all_right(agfa: Agfa) -> None:
    ended = agfa("data", "check", "digits")
    assert (ended.status, ended.err) == (0, "")
    assert "no problems" in ended.out


def test_domains_made_in_memory_have_no_files_to_read() -> None:
    from agfa.data.digits import digits

    assert check(digits()) == []
    assert all(isinstance(domain.images, np.ndarray) for domain in digits().domains)
