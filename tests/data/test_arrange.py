"""What is left to do when archives are unpacked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agfa.data.arrange import LISTED, by_location, remove_duplicates
from agfa.data.unpack import UnusableError
from serving import contents


def test_a_list_that_leads_outside_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("1")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / LISTED).write_text("../precious\n")
    with pytest.raises(UnusableError, match="leaves the folder"):
        remove_duplicates(tmp_path / "draft")
    assert (tmp_path / "precious").exists()


def test_terra_incognita_is_arranged_by_location(tmp_path: Path) -> None:
    """Two annotation files; a location and an animal that are not wanted; an image with two animals."""
    animals = ["bird", "dog", "car", "empty"]
    shots = [("a", 38, [0]), ("b", 100, [1]), ("c", 38, [2]), ("d", 7, [0]), ("e", 46, [0, 1]), ("f", 43, [3])]
    for part, file in enumerate(("cis", "trans")):
        mine = shots[part::2]
        record = {
            "categories": [{"id": i, "name": name} for i, name in enumerate(animals)],
            "images": [{"id": name, "location": place, "file_name": f"{name}.jpg"} for name, place, _ in mine],
            "annotations": [{"image_id": name, "category_id": i} for name, _, found in mine for i in found],
        }
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"{file}.json").write_text(json.dumps(record))
    (tmp_path / "images").mkdir()
    for name, _, _ in shots:
        (tmp_path / "images" / f"{name}.jpg").write_text(name)
    by_location(tmp_path)
    assert contents(tmp_path) == {
        "location_38/bird/a.jpg": b"a",
        "location_100/dog/b.jpg": b"b",
        "location_46/bird/e.jpg": b"e",
        "location_46/dog/e.jpg": b"e",
        "location_43/empty/f.jpg": b"f",
    }
