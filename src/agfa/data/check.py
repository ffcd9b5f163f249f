"""What is wrong with a dataset: all of it, in one pass, each thing with what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agfa.data.benchmark import Benchmark
from agfa.data.domains import DomainDataset
from agfa.data.splits import Roles
from agfa.data.store import Progress, unreadable_reason
from agfa.errors import UsageError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. A `fatal` one stops training."""

    where: str
    what: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


def check(dataset: DomainDataset, progress: Progress | None = None) -> list[Problem]:
    """Every problem of the dataset as a whole, its files included."""
    problems = list(_structure(dataset))
    if len(dataset.domains) == 1:
        problems.append(
            Problem(
                dataset.name,
                f"has one domain only, {dataset.domains[0].name!r}",
                "nothing can be held out; add a second domain, or train on all of it without --target",
                fatal=False,
            )
        )
    return problems + list(_unreadable(dataset, progress))


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


def _unreadable(dataset: DomainDataset, progress: Progress | None) -> Iterator[Problem]:
    files = [(d.name, Path(f)) for d in dataset.domains if not isinstance(d.images, np.ndarray) for f in d.images]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons = pool.map(unreadable_reason, (path for _, path in files))
        for done, ((domain, path), reason) in enumerate(zip(files, reasons, strict=True), start=1):
            if progress is not None:
                progress(done, len(files))
            if reason is not None:
                yield Problem(str(path), reason, f"mend it or remove it from {domain!r}")
