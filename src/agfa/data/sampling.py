"""Which images a minibatch is made of: a function of (seed, step), balanced by class or weighted where asked."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from agfa.data.domains import FloatArray, IntArray


def sample(n: int, batch_size: int, step: int, seed: tuple[int, ...], weights: bytes | None = None) -> IntArray:
    """The places, among n, of the step's minibatch: one epoch of n draws after another, without end.

    Without weights an epoch is a random permutation of all. With weights (n float64 numbers, as bytes, which a cache
    can look up) an image whose share of their sum is w comes n·w times an epoch, rounded up or down by chance.
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    return np.array([_epoch(n, (*seed, p // n), weights)[p % n] for p in places.tolist()], dtype=np.int64)


@lru_cache(maxsize=64)
def _epoch(n: int, seed: tuple[int, ...], weights: bytes | None) -> IntArray:
    rng = np.random.default_rng(seed)
    order = rng.permutation(n)
    if weights is None:
        return order
    shares = np.frombuffer(weights)
    shares = shares / shares.max()  # the smallest floats have no fractions
    ends = shares[order].cumsum()  # systematic sampling: marks at equal distances, on segments
    marks = (rng.random() + np.arange(n)) * (ends[-1] / n)
    segments = np.searchsorted(ends, marks, side="right")
    last = np.flatnonzero(np.diff(ends, prepend=0))[-1]  # no mark is beyond it, but for rounding
    drawn: IntArray = order[np.minimum(segments, last)]
    return rng.permutation(drawn)


def draw_weights(labels: IntArray, weights: FloatArray | None, class_balanced: bool) -> FloatArray | None:
    """How often each of some images of one domain is drawn, relative to the others; None where all are alike.

    Balanced, every class has the same sum, divided among its images in proportion to their weights.
    """
    if not class_balanced:
        return weights
    mine = np.ones(len(labels)) if weights is None else weights
    sums = np.bincount(labels, mine)
    return np.divide(mine, sums[labels], out=np.zeros(len(mine)), where=sums[labels] > 0)
