"""Curves are found where runs differ in one hyperparameter alone, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from agfa.benchmark.records import read_runs
from agfa.benchmark.sensitivity import curve_table, curves
from agfa.benchmark.tables import Cell
from support_runs import make_run

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


def make(root: Path, name: str, target: str, score: float, seed: int = 0, **hparams: object) -> None:
    sources = tuple(d for d in DOMAINS if d != target)
    measured = {**dict.fromkeys(sources, 0.9), f"{target} test": score, f"{target} oracle": 0.5}
    make_run(
        root / f"{name}-{target}-{seed}",
        **{"target": (target,), "source": sources, "algorithm": "agfa", "hparams": hparams, "averaging": "swad"},
        **{"seed": seed, "data": "PACS", "backbone": "resnet50", "finals": {"swad": measured}},
    )


def test_a_curve_of_eta_with_its_zero_and_the_papers_beside(tmp_path: Path) -> None:
    for eta, score in ((0.0, 0.5), (0.1, 0.7), (1.0, 0.6)):
        for target in ("photo", "sketch"):
            for seed in (0, 1):
                make(tmp_path, f"eta{eta}", target, score + seed / 10, seed, eta=eta)
    (curve,) = curves(read_runs([tmp_path]), "training-domain")
    assert (curve.dataset, curve.row, curve.hparam) == ("PACS", "agfa", "eta")
    means = {value: cells[-1].mean for value, cells in curve.points.items() if isinstance(cells[-1], Cell)}
    assert means == pytest.approx({0.0: 0.55, 0.1: 0.75, 1.0: 0.65})
    assert all(cells[-1].seeds == 2 for cells in curve.points.values() if isinstance(cells[-1], Cell))
    table = curve_table(curve)
    assert table.header == ("eta", "Photo", "Sketch", "Average")
    labels = [line.label for line in table.lines]
    assert labels[:3] == ["eta=0", "eta=0, published", "eta=0.01, published"]
    photo, sketch, average = (cell.mean for cell in table.lines[1].cells if isinstance(cell, Cell))
    assert average == pytest.approx((photo + sketch) / 2)  # of two targets, as ours is; the paper prints that of four


def test_random_draws_are_no_curve(tmp_path: Path) -> None:
    for i, target in enumerate(DOMAINS):
        make(tmp_path, "drawn", target, 0.5, eta=0.1 + i / 10, alpha=1 - i / 10)
        make(tmp_path, "one a target", target, 0.5, lr=1e-4 * (i + 1))
    assert curves(read_runs([tmp_path]), "training-domain") == []
