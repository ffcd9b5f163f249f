"""How far probabilities can be trusted: reliability, expected calibration error, accuracy against coverage.

`confidence` is the probability of the class that was named for each image, `right` whether it was the true one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
BINS = 15
SHARES = tuple(n / 20 for n in range(20, 0, -1))  # of the images


def reliability(confidence: Floats, right: Bools) -> list[tuple[float, float, int]]:
    """(mean confidence, accuracy, images) of bins of equal width, empty ones left out."""
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    found = [(confidence[bins == b], right[bins == b]) for b in np.unique(bins)]
    return [(float(c.mean()), float(r.mean()), len(c)) for c, r in found]


def calibration_error(confidence: Floats, right: Bools) -> float:
    """The mean distance of confidence and accuracy over bins, by their images (ECE)."""
    return sum(n * abs(c - a) for c, a, n in reliability(confidence, right)) / len(confidence)


def coverage(confidence: Floats, right: Bools) -> list[tuple[float, float, float]]:
    """(least confidence, share of images at or above it, their accuracy), from all images to the surest twentieth."""
    order = np.argsort(-confidence, kind="stable")
    least = dict.fromkeys(float(confidence[order[max(1, round(share * len(order))) - 1]]) for share in SHARES)
    return [(t, float((confidence >= t).mean()), float(right[confidence >= t].mean())) for t in least]
