"""Differences on the same seeds and targets: by hand, and by how often the intervals hold what they should."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from agfa.benchmark.paired import bootstrap_interval, difference, differences, differences_table, t_interval
from agfa.benchmark.tables import Accuracies

ONE: Accuracies = {"a": {0: 0.5, 1: 0.7, 2: 0.6}, "b": {0: 0.4, 1: 0.4, 3: 0.9}, "c": {0: 0.9}}
OTHER: Accuracies = {"a": {0: 0.4, 1: 0.4, 2: 0.4}, "b": {0: 0.2, 1: 0.3, 2: 0.3}}


def test_only_pairs_count() -> None:
    """On a: 0.1, 0.3, 0.2; on b: 0.2, 0.1, of the seeds that both have. c has no partner."""
    found = difference("one", ONE, "other", OTHER)
    assert found is not None
    assert found.mean == pytest.approx((0.2 + 0.15) / 2)
    assert (found.pairs, found.seeds) == (5, 2)
    # seeds 0 and 1 have both targets: 0.15 and 0.2
    reach = stats.t.ppf(0.975, 1) * 0.025
    assert found.t == pytest.approx((0.175 - reach, 0.175 + reach))
    assert found.bootstrap is not None
    assert found.bootstrap[0] >= (0.1 + 0.1) / 2 - 1e-9
    assert found.bootstrap[1] <= (0.3 + 0.2) / 2 + 1e-9
    assert difference("one", {"c": {0: 0.9}}, "other", OTHER) is None


def test_the_t_interval_is_scipys() -> None:
    values = [0.01, 0.03, -0.01, 0.02, 0.04]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert t_interval(values) == pytest.approx((expected.low, expected.high))
    assert t_interval([0.5]) is None


def test_the_bootstrap_interval_is_scipys() -> None:
    rng = np.random.default_rng(1)
    columns = rng.normal(0.02, 0.01, (3, 12))
    ours = bootstrap_interval(columns.tolist())
    drawn = stats.bootstrap(
        tuple(columns),
        lambda *c, axis=-1: np.mean([x.mean(axis) for x in c], axis=0),
        n_resamples=20_000,
        method="percentile",
        rng=rng,
    )
    assert ours == pytest.approx(tuple(drawn.confidence_interval), abs=3e-4)
    assert bootstrap_interval([[0.1, 0.2], [0.3]]) is None


def test_intervals_hold_the_true_difference_as_often_as_they_say() -> None:
    """4 targets, 5 seeds: t at its level; the bootstrap below it, which is too narrow for so few."""
    rng = np.random.default_rng(0)
    t, bootstrap, trials = 0, 0, 400
    for values in rng.normal(0.01, 0.02, (trials, 4, 5)):
        low, high = t_interval(values.mean(0).tolist()) or (0, 0)
        t += low < 0.01 < high
        low, high = bootstrap_interval(values.tolist()) or (0, 0)
        bootstrap += low < 0.01 < high
    assert 0.92 < t / trials < 0.98
    assert 0.82 < bootstrap / trials < 0.94


def test_the_best_and_agfa_are_compared_with_all_and_it_is_said_plainly() -> None:
    rows = {
        "erm": {"a": {0: 0.5, 1: 0.52}},
        "agfa": {"a": {0: 0.6, 1: 0.62}},
        "swad": {"a": {0: 0.7, 1: 0.5}},
        "coral": {"a": {0: 0.1}},
    }
    found = differences(rows, ["a"])
    assert [(d.row, d.other) for d in found] == [("agfa", "erm"), ("agfa", "coral"), ("agfa", "swad")]
    table = differences_table("t", found)
    erm, coral, swad = table.lines
    assert (erm.label, erm.cells[0], erm.cells[-1]) == ("AGFA − ERM", "+10.0", "excluded")
    assert coral.cells[1:] == ("too few seeds", "too few seeds", "1 pair, 1 whole seed", "too few seeds")
    assert (swad.cells[0], swad.cells[-1]) == ("+1.0", "possible")
