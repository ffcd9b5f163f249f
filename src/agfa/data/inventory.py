"""What a dataset holds, in few words: to see later whether it is still the same, and what is not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from agfa.data.domains import DomainDataset
from agfa.data.store import Images, digests_of

# how many images, and digests of their names, pixels and weights: "" where pixels are not known, or none weigh
Holding = tuple[int, str, str, str]
Inventory = dict[str, Holding]  # by "domain/class", in their order
FEW = 4  # differences that are named


def inventory(dataset: DomainDataset, images: Mapping[str, Images] | None = None) -> Inventory:
    """What each class of each domain holds; without images, nothing is known of pixels."""
    found = {}
    for domain in dataset.domains:
        contents = digests_of(images[domain.name]) if images else None
        for number, name in enumerate(dataset.classes):
            places = np.flatnonzero(domain.labels == number)
            keys = repr([domain.keys[i] for i in places.tolist()]).encode(errors="surrogateescape")
            pixels, weights = (
                "" if values is None else _short(values[places].tobytes()) for values in (contents, domain.weights)
            )
            found[f"{domain.name}/{name}"] = (len(places), _short(keys), pixels, weights)
    return found


def changes(then: Inventory, now: Inventory) -> list[str]:
    """How two inventories differ, in words; the first few, and how many more."""
    found = []
    for place in dict.fromkeys([*then, *now]):
        n, names, pixels, weights = then.get(place, NOTHING)
        n_now, names_now, pixels_now, weights_now = now.get(place, NOTHING)
        if n != n_now:
            found.append(f"{place} had {n} images, now {n_now}")
        elif names != names_now:
            found.append(f"images in {place} have other names")
        elif pixels and pixels_now and pixels != pixels_now:
            found.append(f"images in {place} have other pixels")
        elif weights != weights_now:
            found.append(f"images in {place} have other weights")
    if not found and list(then) != list(now):
        found.append(f"the classes or domains are {', '.join(now)}, in this order; they were {', '.join(then)}")
    return found[:FEW] + ([f"and {len(found) - FEW} more such"] if len(found) > FEW else [])


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


NOTHING: Holding = (0, "", "", "")
