"""How far probabilities can be believed: calibration, and what is gained by abstaining.

Everything is of plain arrays: `probabilities` (n, C), `labels` (n,), the `confidence` in an answer and whether it is
`right` (n,). Nothing is told of no images: nan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

Array = npt.NDArray[Any]
BINS = 15


class Reliability(NamedTuple):
    """Mean confidence, accuracy and number of images of every bin that has any."""

    confidence: Array
    accuracy: Array
    n: Array


class Coverage(NamedTuple):
    """What is answered when only answers of at least this confidence are given: the share, and its accuracy."""

    confidence: Array
    share: Array
    accuracy: Array

    def accuracy_at(self, share: float) -> float:
        """The accuracy of the most confident answers that are at least this share of all."""
        enough = np.flatnonzero(self.share >= share - 1e-9)
        return float(self.accuracy[enough[0]]) if len(enough) else float("nan")


def reliability(confidence: Array, right: Array, bins: int = BINS) -> Reliability:
    """Bins of the same width, each closed above: (0, 1/bins], ..."""
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    n = np.bincount(place, minlength=bins)
    there = n > 0
    sums = (np.bincount(place, weights=np.asarray(v, float), minlength=bins)[there] for v in (confidence, right))
    mean_confidence, accuracy = (of_bin / n[there] for of_bin in sums)
    return Reliability(mean_confidence, accuracy, n[there])


def ece(confidence: Array, right: Array, bins: int = BINS) -> float:
    """Expected calibration error: the mean over images of |confidence - accuracy| of their bin."""
    if not len(right):
        return float("nan")
    found = reliability(confidence, right, bins)
    return float((np.abs(found.confidence - found.accuracy) * found.n).sum() / found.n.sum())


def brier(probabilities: Array, labels: Array) -> float:
    """Mean squared distance of the probabilities from the answer, summed over classes: 0 to 2."""
    if not len(labels):
        return float("nan")
    truth = np.eye(probabilities.shape[1])[labels]
    return float(np.square(probabilities - truth).sum(1).mean())


def nll(probabilities: Array, labels: Array) -> float:
    """Mean -log of the right class's probability, which counts as at least the smallest float32."""
    if not len(labels):
        return float("nan")
    right = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(right.astype(float), np.finfo(np.float32).tiny)).mean())


def auroc(unseen: Array, seen: Array) -> float:
    """The chance that an image of the first kind scores higher than one of the second; ties count half."""
    if not (len(unseen) and len(seen)):
        return float("nan")
    ranks = rankdata(np.concatenate([unseen, seen]))
    above = ranks[: len(unseen)].sum() - len(unseen) * (len(unseen) + 1) / 2
    return float(above / (len(unseen) * len(seen)))


def coverage(confidence: Array, right: Array) -> Coverage:
    """Accuracy against the share answered, a point for each confidence that occurs, the highest first."""
    order = np.argsort(-confidence, kind="stable")
    confidence, right = confidence[order], np.asarray(right, float)[order]
    last = np.append(confidence[1:] != confidence[:-1], True) if len(right) else np.zeros(0, bool)
    answered = np.arange(1, len(right) + 1)
    return Coverage(confidence[last], (answered / max(1, len(right)))[last], (right.cumsum() / answered)[last])
