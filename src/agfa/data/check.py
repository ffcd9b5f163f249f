"""What is wrong with a dataset: all of it, in one pass, each thing with what to do about it."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from agfa.data.benchmark import Benchmark
from agfa.data.domains import DomainDataset, image_suffixes, is_image, visible_files, visible_folders
from agfa.data.inspection import Problem, inspect_files
from agfa.data.sources import printable
from agfa.data.splits import Roles
from agfa.data.store import Progress
from agfa.errors import UsageError

FEWEST = 3  # images of a domain: of fewer, 20% is none
FEW = 5  # images of a class in a domain: of fewer, a validation of 20% may have none


def check(dataset: DomainDataset, progress: Progress | None = None) -> list[Problem]:
    """Every problem of the dataset as a whole, its files included."""
    problems = [*_structure(dataset), *_oddities(dataset)]
    if dataset.root is not None:
        problems += _strays(dataset.root)
    return problems + inspect_files(dataset, progress)


def compare_counts(dataset: DomainDataset, benchmark: Benchmark) -> list[Problem]:
    """Where a known dataset has more or fewer images than it should."""
    problems = []
    for place, counts in zip(benchmark.places, dataset.counts().tolist(), strict=True):
        by_class = isinstance(place.images, tuple)
        wanted = place.images if isinstance(place.images, tuple) else (place.images,)
        found = counts if by_class else [sum(counts)]
        names = [f"class {name!r}" for name in dataset.classes] if by_class else ["it"]
        problems += [
            Problem(
                f"{benchmark.name}/{place.name}",
                f"{name} has {n} images, {m} are expected",
                "get the dataset again",
                fatal=False,
            )
            for name, n, m in zip(names, found, wanted, strict=True)
            if n != m
        ]
    return problems


def require_trainable(dataset: DomainDataset, roles: Roles, allow_missing_classes: bool) -> None:
    """Refuse to train on sources that cannot teach what the model is to know.

    Raises:
        UsageError: the first reason.
    """
    counts = dataset.counts()
    sources = [i for i, name in enumerate(dataset.domain_names) if name in roles.sources]
    for c, name in enumerate(dataset.classes):
        if counts[:, c].sum() and not counts[sources, c].sum():
            held_out = ", ".join(n for i, n in enumerate(dataset.domain_names) if counts[i, c])
            raise UsageError(
                f"{dataset.name}: class {name!r} is in no source domain, only in {held_out}; "
                "hold out another domain, or add images of it to a source"
            )
    for problem in _structure(dataset):
        if problem.fatal and not allow_missing_classes:
            raise UsageError(f"{problem} (--allow-missing-classes trains all the same)")


def _structure(dataset: DomainDataset) -> Iterator[Problem]:
    """Classes without images: everywhere, in all domains but one, or in one domain."""
    counts = dataset.counts()
    names = dataset.domain_names
    for domain in dataset.domains:
        if not len(domain):
            yield Problem(f"{dataset.name}/{domain.name}", "has no images", "add some, or remove the folder")
    for c, name in enumerate(dataset.classes):
        present = np.flatnonzero(counts[:, c])
        if len(present) == 0:
            yield Problem(
                dataset.name, f"class {name!r} is empty in every domain", "add images, or remove its folders"
            )
        elif len(present) == 1 and len(names) > 2:
            yield Problem(
                dataset.name,
                f"class {name!r} is in {names[present[0]]!r} alone",
                "add it to the other domains, or remove it",
            )
        else:
            for d in np.flatnonzero((counts[:, c] == 0) & (counts.sum(axis=1) > 0)).tolist():
                yield Problem(f"{dataset.name}/{names[d]}", f"has no images of class {name!r}", "add some")


def _oddities(dataset: DomainDataset) -> Iterator[Problem]:
    """What is probably a mistake but stops nothing: names that are nearly the same, few images, one domain."""
    for kind, names in (("domains", dataset.domain_names), ("classes", dataset.classes)):
        alike: dict[str, list[str]] = {}
        for name in names:
            alike.setdefault(unicodedata.normalize("NFC", name).strip().casefold(), []).append(name)
        for group in alike.values():
            if len(group) > 1:
                yield Problem(
                    dataset.name,
                    f"{kind} {' and '.join(map(repr, group))} differ only by case or spaces",
                    "give them one name if they are the same",
                    fatal=False,
                )
    for domain in dataset.domains:
        if 0 < len(domain) < FEWEST:
            yield Problem(
                f"{dataset.name}/{domain.name}",
                f"has only {_count(len(domain), 'image')} in all",
                "a share of them is to be held out; add some, or remove the domain",
            )
    counts = dataset.counts()
    for d, c in np.argwhere((counts > 0) & (counts < FEW)).tolist():
        yield Problem(
            f"{dataset.name}/{dataset.domain_names[d]}",
            f"has only {_count(int(counts[d, c]), 'image')} of class {dataset.classes[c]!r}",
            f"with fewer than {FEW}, validation may have none",
            fatal=False,
        )
    if len(dataset.domains) == 1:
        yield Problem(
            dataset.name,
            f"has one domain only, {dataset.domain_names[0]!r}",
            "nothing can be held out; add a second domain, or train on all of it without --target",
            fatal=False,
        )


def _strays(root: Path) -> Iterator[Problem]:
    """Files in the folder domain/class/image that belong to no class, and that training therefore ignores."""
    suffixes = image_suffixes()

    def loose(folder: Path) -> list[str]:
        return sorted(f.name for f in folder.iterdir() if is_image(f.name, suffixes) and _is_visible_file(f))

    if names := loose(root):
        what = f"{_count(len(names), 'image')} in no domain, {printable(names[0])} the first"
        yield Problem(str(root), what, "ignored; move to DOMAIN/CLASS/", fatal=False)
    for domain in visible_folders(root):
        names, classes = loose(domain), visible_folders(domain)
        if names:
            what = f"{_count(len(names), 'image')} in no class, {printable(names[0])} the first"
            yield Problem(str(domain), what, "ignored; move to the folder of the class", fatal=False)
        elif not classes:
            what = "has no folders of classes, so it is no domain"
            yield Problem(str(domain), what, "ignored; add images as CLASS/IMAGE, or remove it", fatal=False)
        others = [
            os.path.relpath(Path(parent, name), domain)
            for folder in classes
            for parent, name in visible_files(folder)
            if not is_image(name, suffixes)
        ]
        if others:
            what = f"{_count(len(others), 'file')} not named like an image, {printable(min(others))} the first"
            yield Problem(
                str(domain), what, "ignored; if they are images, give them an ending that says so", fatal=False
            )


def _is_visible_file(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" + ("s" if n != 1 else "")
