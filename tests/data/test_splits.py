"""Which images are held out is a function of the seed and the names, the same everywhere."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agfa.data.domains import Domain, DomainDataset, from_folder
from agfa.data.splits import Roles, assign_roles, hold_out
from agfa.errors import UsageError


def domain(labels: list[int], name: str = "d", keys: list[str] | None = None) -> Domain:
    keys = keys or [f"{label}/{i}.png" for i, label in enumerate(labels)]
    return Domain(name, tuple(keys), np.array(labels, dtype=np.int64), [])


LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=60)
FRACTION = st.floats(0.01, 0.99)
SEED = st.integers(0, 2**32)


@given(LABELS, FRACTION, SEED, st.booleans())
def test_the_parts_are_disjoint_and_complete(labels: list[int], fraction: float, seed: int, stratified: bool) -> None:
    kept, held = hold_out(domain(labels), fraction, seed, stratified)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(len(labels)))
    assert (np.diff(kept) > 0).all()
    assert (np.diff(held) > 0).all()


@given(LABELS, FRACTION, SEED)
def test_the_fraction_is_held_out(labels: list[int], fraction: float, seed: int) -> None:
    _, held = hold_out(domain(labels), fraction, seed)
    assert len(held) == round(len(labels) * fraction)


@given(LABELS, FRACTION, SEED)
def test_stratified_holds_it_out_of_each_class(labels: list[int], fraction: float, seed: int) -> None:
    _, held = hold_out(domain(labels), fraction, seed, stratified=True)
    y = np.array(labels)
    for label in set(labels):
        assert (y[held] == label).sum() == round((y == label).sum() * fraction)


@given(LABELS, FRACTION, SEED, st.booleans())
def test_the_order_of_the_images_does_not_matter(
    labels: list[int], fraction: float, seed: int, stratified: bool
) -> None:
    straight = domain(labels)
    order = np.random.default_rng(seed).permutation(len(labels))
    mixed = domain([labels[i] for i in order], keys=[straight.keys[i] for i in order])
    one = {straight.keys[i] for i in hold_out(straight, fraction, seed, stratified)[1]}
    other = {mixed.keys[i] for i in hold_out(mixed, fraction, seed, stratified)[1]}
    assert one == other


def test_the_order_of_the_file_system_does_not_matter(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = from_folder(tiny)
    walk = os.walk

    def backwards(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for parent, folders, files in walk(*args, **kwargs):
            yield parent, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    for one, other in zip(straight.domains, from_folder(tiny).domains, strict=True):
        for stratified in (False, True):
            for a, b in zip(hold_out(one, 0.2, 0, stratified), hold_out(other, 0.2, 0, stratified), strict=True):
                np.testing.assert_array_equal(a, b)


@given(st.integers(2, 60), FRACTION, SEED)
def test_one_more_image_moves_no_other_but_at_the_border(n: int, fraction: float, seed: int) -> None:
    """The images keep their rank: held out is a beginning of the same order."""
    before, after = domain([0] * n), domain([0] * (n + 1))
    held_before = set(hold_out(before, fraction, seed)[1].tolist())
    held_after = set(hold_out(after, fraction, seed)[1].tolist())
    assert len(held_before - held_after) <= 1
    assert len(held_after - held_before) <= 1


DIGESTS = ["ca412d23fcea8ba3", "9a5d0e8885394084"]  # by a few lines of plain Python
PINNED = [4, 6, 8, 9, 16, 17]


def test_the_same_on_every_machine() -> None:
    _, held = hold_out(domain([0] * 20), 0.3, seed=0)
    assert held.tolist() == PINNED
    assert hold_out(domain([0] * 20), 0.3, seed=1)[1].tolist() != PINNED
    assert hold_out(domain([0] * 20, name="e"), 0.3, seed=0)[1].tolist() != PINNED


def test_the_same_names_of_many_on_every_machine() -> None:
    """The digest of a larger split, with classes and names that are no ASCII."""
    many = domain([i % 7 for i in range(5000)], name="Ärzte", keys=[f"größe/{i}.png" for i in range(5000)])
    digests = []
    for stratified in (False, True):
        _, held = hold_out(many, 0.2, 3, stratified)
        digests.append(hashlib.sha256("\n".join(many.keys[i] for i in held).encode()).hexdigest()[:16])
    assert digests == DIGESTS


def test_accents_are_the_same_however_they_are_encoded() -> None:
    """macOS may take names apart (u and two dots) that Linux keeps composed."""
    keys = [f"größe/{i}.png" for i in range(40)]
    for form in ("NFC", "NFD"):
        apart = domain([0] * 40, unicodedata.normalize(form, "Ärzte"), [unicodedata.normalize(form, k) for k in keys])
        want = hold_out(domain([0] * 40, "Ärzte", keys), 0.3, 0)[1]
        np.testing.assert_array_equal(hold_out(apart, 0.3, 0)[1], want)


def test_held_out_images_are_a_fair_draw() -> None:
    counts = np.zeros(50)
    for seed in range(400):
        counts[hold_out(domain([0] * 50), 0.2, seed)[1]] += 1
    assert counts.sum() == 400 * 10
    assert abs(counts - 80).max() < 40  # five standard deviations


def test_a_domain_without_images_has_nothing_to_hold_out() -> None:
    for stratified in (False, True):
        kept, held = hold_out(domain([]), 0.2, 0, stratified)
        assert (len(kept), len(held)) == (0, 0)


# --- roles


DATASET = DomainDataset("abc", ("x",), tuple(domain([0], name=name) for name in "abc"))


@pytest.mark.parametrize(
    ("target", "source", "roles"),
    [
        (("b",), (), Roles(("a", "c"), ("b",))),
        (("c", "a"), (), Roles(("b",), ("a", "c"))),
        ((), ("b",), Roles(("b",), ("a", "c"))),
        ((), ("c", "a"), Roles(("a", "c"), ("b",))),
        ((), (), Roles(("a", "b", "c"), ())),
        (("c",), ("a",), Roles(("a",), ("c",))),
        ((), ("a", "b", "c"), Roles(("a", "b", "c"), ())),
    ],
)
def test_protocols(target: tuple[str, ...], source: tuple[str, ...], roles: Roles) -> None:
    assert assign_roles(DATASET, target, source) == roles


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        (("a", "b", "c"), (), "no source domain is left: abc has only a, b, c"),
        (("a",), ("a",), "'a' is both source and target"),
        (("z",), (), "unknown domain of abc 'z'; there are: a, b, c"),
        ((), ("z",), "unknown domain of abc 'z'"),
    ],
)
def test_roles_that_cannot_be(target: tuple[str, ...], source: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        assign_roles(DATASET, target, source)
