"""Each figure against scikit-learn or a transcription of its definition, and where there is little to go by."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from agfa.training.calibration import auroc, brier, coverage, ece, nll, reliability


def answers(n: int = 500, classes: int = 4, seed: int = 0, digits: int | None = None):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(classes, 0.5), n)
    if digits is not None:  # ties
        probabilities = np.round(probabilities, digits)
    labels = rng.integers(classes, size=n)
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    return probabilities, labels, confidence, right


def ece_by_definition(confidence, right, bins):
    total = 0.0
    for b in range(bins):
        inside = [i for i, c in enumerate(confidence) if b / bins < c <= (b + 1) / bins or (b == 0 and c == 0)]
        if inside:
            gap = np.mean([confidence[i] for i in inside]) - np.mean([float(right[i]) for i in inside])
            total += len(inside) / len(confidence) * abs(gap)
    return total


@pytest.mark.parametrize("bins", [1, 5, 15])
@pytest.mark.parametrize("seed", range(3))
def test_ece_is_that_of_its_definition(bins, seed):
    _, _, confidence, right = answers(seed=seed)
    assert ece(confidence, right, bins) == pytest.approx(ece_by_definition(confidence, right, bins), abs=1e-12)


def test_ece_by_hand():
    assert ece(np.array([0.95, 0.95, 0.55, 0.55]), np.array([1, 1, 1, 0])) == pytest.approx(0.05)
    assert ece(np.ones(4), np.array([1, 1, 0, 0])) == 0.5  # all in the last bin
    assert ece(np.zeros(2), np.array([0, 0])) == 0.0
    assert ece(np.full(10, 0.7), np.arange(10) < 7) == pytest.approx(0, abs=1e-12)


def test_reliability_leaves_empty_bins_out_and_every_image_in():
    _, _, confidence, right = answers()
    found = reliability(confidence, right)
    assert found.n.sum() == 500
    assert len(found.n) < 15  # four classes: no confidence below 1/4
    assert (found.n * found.accuracy).sum() == pytest.approx(right.sum())
    assert (found.n * found.confidence).sum() == pytest.approx(confidence.sum())
    assert (np.diff(found.confidence) > 0).all()


@pytest.mark.parametrize("classes", [2, 4])
def test_brier_and_nll_are_scikit_learns(classes):
    probabilities, labels, _, _ = answers(classes=classes)
    truth = [[float(c == y) for c in range(classes)] for y in labels]
    wanted = np.mean(
        [sum((p - t) ** 2 for p, t in zip(a, b, strict=True)) for a, b in zip(probabilities, truth, strict=True)]
    )
    assert brier(probabilities, labels) == pytest.approx(wanted)
    assert nll(probabilities, labels) == pytest.approx(log_loss(labels, probabilities, labels=range(classes)))


def test_probabilities_of_0_and_1():
    certain, labels = np.eye(3, dtype=np.float32), np.arange(3)
    assert (brier(certain, labels), nll(certain, labels)) == (0, 0)
    assert brier(certain, (labels + 1) % 3) == 2
    assert nll(certain, (labels + 1) % 3) == pytest.approx(-math.log(np.finfo(np.float32).tiny))


@pytest.mark.parametrize("digits", [None, 2, 1])
def test_auroc_is_scikit_learns_ties_included(digits):
    rng = np.random.default_rng(0)
    unseen, seen = rng.normal(0.5, 1, 300), rng.normal(0, 1, 200)
    if digits is not None:
        unseen, seen = unseen.round(digits), seen.round(digits)
    wanted = roc_auc_score([1] * 300 + [0] * 200, np.concatenate([unseen, seen]))
    assert auroc(unseen, seen) == pytest.approx(wanted, abs=1e-12)
    assert auroc(seen, unseen) == pytest.approx(1 - wanted, abs=1e-12)


def test_auroc_of_scores_that_say_nothing_or_all():
    assert auroc(np.zeros(5), np.zeros(7)) == 0.5
    assert auroc(np.ones(5), np.zeros(7)) == 1.0
    assert math.isnan(auroc(np.ones(5), np.zeros(0)))
    assert math.isnan(auroc(np.zeros(0), np.ones(5)))


@pytest.mark.parametrize("digits", [None, 1])
def test_coverage_is_that_of_every_threshold(digits):
    _, _, confidence, right = answers(digits=digits)
    found = coverage(confidence, right)
    assert found.confidence.tolist() == sorted(set(confidence), reverse=True)
    for threshold, share, accuracy in zip(*found, strict=True):
        given = confidence >= threshold
        assert (share, accuracy) == (given.mean(), pytest.approx(right[given].mean()))
    assert (found.share[-1], found.accuracy[-1]) == (1, pytest.approx(right.mean()))


def test_accuracy_at_a_share_never_takes_half_of_a_tie():
    found = coverage(np.array([0.9, 0.8, 0.8, 0.1]), np.array([1, 1, 0, 0]))
    assert [found.accuracy_at(share) for share in (0.1, 0.25, 0.5, 0.75, 1)] == [1, 1, 2 / 3, 2 / 3, 0.5]


def test_no_images():
    none = np.zeros(0)
    assert all(
        math.isnan(v)
        for v in (ece(none, none), brier(np.zeros((0, 3)), none.astype(int)), nll(np.zeros((0, 3)), none.astype(int)))
    )
    assert coverage(none, none).share.tolist() == []
    assert math.isnan(coverage(none, none).accuracy_at(0.5))
    assert reliability(none, none).n.tolist() == []


def test_one_class():
    probabilities, labels = np.ones((4, 1)), np.zeros(4, int)
    assert (brier(probabilities, labels), nll(probabilities, labels)) == (0, 0)
    assert ece(probabilities.max(1), np.ones(4)) == 0
