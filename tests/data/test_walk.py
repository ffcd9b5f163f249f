"""A folder is walked in one order, whole, with few names in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agfa.data import walk
from agfa.data.walk import count, image_files
from agfa.errors import UsageError

NAMES = [
    "b.png",
    "a/x.jpg",
    "a.jpg",
    "a/b/y.JPEG",
    "a-1/z.png",
    "ä.png",
    "B.png",
    "c/.hidden.png",
    ".d/e.png",
    "f.txt",
]


def fill(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 100])
def test_the_order_is_that_of_sorted_paths(at_a_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "NAMES", at_a_time)
    folder = fill(tmp_path / "images", NAMES)
    want = sorted(folder / name for name in NAMES if "." not in (name[0], name.split("/")[-1][0]) and name != "f.txt")
    assert list(image_files(folder)) == want
    assert count(folder) == len(want) == 7


@given(st.lists(st.text("ab", min_size=1, max_size=4), unique=True), st.integers(1, 5))
def test_any_folder_in_any_portions(names: list[str], at_a_time: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "NAMES", at_a_time)
        folder = fill(Path(made), [f"{name}.png" for name in names])
        assert list(image_files(folder)) == sorted(folder / f"{name}.png" for name in names)


def test_links_to_folders_are_not_followed_and_broken_ones_are_reported_later(tmp_path: Path) -> None:
    folder = fill(tmp_path / "images", ["a/x.png"])
    (folder / "loop").symlink_to(folder)
    (folder / "folder.png").symlink_to(folder)
    (folder / "gone.png").symlink_to("nowhere")
    (folder / "same.png").symlink_to("a/x.png")
    assert [f.relative_to(folder).as_posix() for f in image_files(folder)] == ["a/x.png", "gone.png", "same.png"]


def test_nothing_is_read_before_it_is_needed(tmp_path: Path) -> None:
    folder = fill(tmp_path / "images", ["a/x.png", "b/y.png"])
    files = image_files(folder)
    assert next(files) == folder / "a" / "x.png"
    (folder / "b" / "y.png").rename(folder / "b" / "z.png")
    assert next(files) == folder / "b" / "z.png"


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the folder .*nowhere: No such file"):
        list(image_files(tmp_path / "nowhere"))


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.png")
    try:
        (tmp_path / name).touch()
    except OSError:
        pytest.skip("this file system takes text only")
    assert [f.name for f in image_files(tmp_path)] == [name]
