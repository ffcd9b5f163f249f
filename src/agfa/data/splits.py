"""Which images train, which validate, which test: a function of the seed and the images' names alone."""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass

import numpy as np

from agfa.data.domains import Domain, DomainDataset, IntArray
from agfa.errors import UsageError


@dataclass(frozen=True)
class Roles:
    """Which domains a model trains on, and which it has never seen."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


def assign_roles(dataset: DomainDataset, target: tuple[str, ...], source: tuple[str, ...]) -> Roles:
    """Hold `target` out; or train on `source` and hold out the rest; or, with neither, train on all."""
    names = dataset.domain_names
    for name in (*target, *source):
        dataset[name]  # says what there is when there is no such domain
    if source and target:
        chosen, held_out = set(source), set(target)
    elif source:
        chosen, held_out = set(source), set(names) - set(source)
    else:
        chosen, held_out = set(names) - set(target), set(target)
    if chosen & held_out:
        raise UsageError(f"{sorted(chosen & held_out)[0]!r} is both source and target; a target must be unseen")
    if not chosen:
        raise UsageError(
            f"no source domain is left: {dataset.name} has only {', '.join(names)}; "
            "hold out fewer, or leave out --target to train on all"
        )
    return Roles(tuple(n for n in names if n in chosen), tuple(n for n in names if n in held_out))


def hold_out(domain: Domain, fraction: float, seed: int, stratified: bool = False) -> tuple[IntArray, IntArray]:
    """Split a domain's images into (kept, held out), both sorted; `fraction` of them are held out.

    Images are ranked by a hash of seed, domain and name: the same on every machine and whatever the
    order of the file system. `stratified` holds out the fraction of each class.
    """
    rank = np.array([_rank(f"{seed}\0{domain.name}\0{key}") for key in domain.keys], dtype="S32")
    groups = [np.flatnonzero(domain.labels == c) for c in np.unique(domain.labels)]
    if not stratified:
        groups = [np.arange(len(domain))]
    held = np.zeros(len(domain), dtype=bool)
    for group in groups:
        held[group[np.argsort(rank[group], kind="stable")[: round(len(group) * fraction)]]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _rank(name: str) -> bytes:
    """A hash of a name however its accents are encoded (one system composes them, another does not)."""
    return hashlib.sha256(unicodedata.normalize("NFC", name).encode(errors="surrogateescape")).digest()
