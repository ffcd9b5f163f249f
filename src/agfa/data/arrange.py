"""What is left to do in a dataset's folder when its archives are unpacked, as DomainBed does it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from agfa.data.unpack import UnusableError, plain_parts
from agfa.files import writing

LISTED = "domain_net_duplicates.txt"
LOCATIONS = (38, 43, 46, 100)
ANIMALS = ("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel")


def remove_duplicates(folder: Path) -> None:
    """Remove the images that the list in the folder names, and the list."""
    listed = folder / LISTED
    for name in listed.read_text().splitlines():
        with writing(folder):
            folder.joinpath(*plain_parts(name.strip())).unlink(missing_ok=True)
    listed.unlink()


def by_location(folder: Path) -> None:
    """Put `images`, by what `annotations` says of them, to location_N/animal; leave out all the others.

    An image with two animals goes to both classes, as in DomainBed.
    """
    animals: dict[int, str] = {}
    places: dict[str, tuple[str, str]] = {}
    seen: set[tuple[str, int]] = set()
    for path in sorted((folder / "annotations").glob("*.json")):
        try:
            content = json.loads(path.read_text())
            animals |= {int(c["id"]): str(c["name"]) for c in content["categories"]}
            places |= {str(i["id"]): (str(i["location"]), str(i["file_name"])) for i in content["images"]}
            seen |= {(str(a["image_id"]), int(a["category_id"])) for a in content["annotations"]}
        except (ValueError, KeyError, TypeError) as error:
            raise UnusableError(f"its {path.name} is not as expected ({error!r})") from error
    wanted = {str(location) for location in LOCATIONS}
    for image, animal in sorted(seen):
        location, name = places.get(image, ("", ""))
        if location not in wanted or animals.get(animal) not in ANIMALS:
            continue
        source = folder.joinpath("images", *plain_parts(name))
        if not source.is_file():
            raise UnusableError(f"it has no image {name}")
        target = folder.joinpath(f"location_{location}", animals[animal], *plain_parts(name))
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for name in ("images", "annotations"):
        shutil.rmtree(folder / name)
