"""The accuracy to expect on the next domain, with an interval, from the few domains that were held out in turn.

The method, settled before any of it was measured on Digits:

- A domain's accuracy is the mean over rounds of its accuracy when held out. The expected accuracy is the mean of
  these over domains.
- The domains are taken for draws of one population, from which the next one comes too (exchangeable). On the scale of
  log-odds, where an accuracy has no ends to run into, they are taken to be normal with unknown mean and spread. The
  next one then follows Student's t with D - 1 degrees of freedom around their mean, with sqrt(1 + 1/D) times their
  spread: the prediction interval of the textbooks. A spread below what the number of images alone would give
  is raised to that.
- The interval is the shortest that holds 80% of this distribution, on the scale of accuracies. What is shortest shows
  in the same few domains, so it holds the next one less often than that, in about three of four cases: of simulated
  domains, normal on the scale of log-odds, in 69 to 76% with three domains, 67 to 76% with two, 73 to 79% with six.
  (As first settled it was the shortest of 75%; this simulation, made before any interval on Digits, showed that it
  holds 63 to 71% with three.) More than that is not asked for, because with three domains no method can promise it
  without such assumptions: that the next of four exchangeable domains is the worst has the chance 1/4.

No constant is fitted to anything. On the paper's published tables (116 rows of five benchmarks; every domain
predicted from every three of the others) the interval holds the accuracy in 79% and is 43 points wide on average.

The final model learns from one domain more than the models that were measured; no correction is made for that, so
the figure tends to be low rather than high, with three domains much so (docs/results.md has Digits). Where the next
domain is of another kind than all of these, it is void.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit, stdtrit

LEVEL = 0.8  # nominal
OFTEN = "about three of four cases"  # as measured
FINENESS = 1001  # places that the shortest interval is looked for at


class Expected(NamedTuple):
    """An accuracy and its interval, as fractions."""

    accuracy: float
    low: float
    high: float


def expected(accuracies: Sequence[float], images: Sequence[int]) -> Expected:
    """The accuracy to expect on the next domain, from those of two or more domains with so many images."""
    shares, counts = np.asarray(accuracies, dtype=float), np.asarray(images, dtype=float)
    inside = (shares * counts + 0.5) / (counts + 1)  # 100% of a few images is not 100%
    odds = logit(inside)
    by_chance = np.mean(1 / (counts * inside * (1 - inside)))  # the variance that counting alone has, by log-odds
    spread = max(np.var(odds, ddof=1), by_chance) ** 0.5 * (1 + 1 / len(odds)) ** 0.5
    left = (np.arange(FINENESS) + 0.5) / FINENESS * (1 - LEVEL)  # probability below the interval
    low, high = (expit(odds.mean() + spread * stdtrit(len(odds) - 1, tail)) for tail in (left, left + LEVEL))
    shortest = int(np.argmin(high - low))
    mean = float(shares.mean())
    return Expected(mean, min(mean, float(low[shortest])), max(mean, float(high[shortest])))
