"""Differences between two methods on the same seeds and targets, with intervals.

Both intervals are for the mean difference over targets that are given, at 95%:

- bootstrap: the seeds of each target are drawn again, with replacement, 10,000 times; the interval holds the middle
  95% of the means. It assumes nothing of the distribution, and is too narrow for few seeds (docs/report.md
  has how often it holds).
- paired t: the mean over targets of each seed that has them all, then Student's t over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from agfa.benchmark.rows import title
from agfa.benchmark.tables import Accuracies, Line, Table, in_order, seed_means

LEVEL = 0.95
RESAMPLES = 10_000

Interval = tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """One row minus another: fractions. An interval is None where there are too few seeds for it."""

    row: str
    other: str
    mean: float
    bootstrap: Interval | None
    t: Interval | None
    pairs: int
    seeds: int  # with every column

    @property
    def verdict(self) -> str:
        """Whether the intervals leave it open that there is no difference."""
        if self.bootstrap is None or self.t is None:
            return "too few seeds"
        excluded = {low > 0 or high < 0 for low, high in (self.bootstrap, self.t)}
        return "the intervals disagree" if len(excluded) == 2 else "excluded" if True in excluded else "possible"


def difference(row: str, one: Accuracies, other_row: str, other: Accuracies) -> Difference | None:
    """`one` minus `other` on the seeds and columns that both have; None where they share a column in no seed.

    Columns that only one of them has are left out.
    """
    columns = [column for column in one if one[column].keys() & other.get(column, {}).keys()]
    if not columns:
        return None
    apart = {
        column: {
            seed: one[column][seed] - other[column][seed]
            for seed in sorted(one[column].keys() & other[column].keys())
        }
        for column in columns
    }
    by_column = [list(by_seed.values()) for by_seed in apart.values()]
    by_seed = list(seed_means(apart, columns).values())
    return Difference(
        row=row,
        other=other_row,
        mean=float(np.mean([np.mean(values) for values in by_column])),
        bootstrap=bootstrap_interval(by_column),
        t=t_interval(by_seed),
        pairs=sum(map(len, by_column)),
        seeds=len(by_seed),
    )


def bootstrap_interval(by_column: Sequence[Sequence[float]]) -> Interval | None:
    """Of the mean over columns of their means, each column's values drawn again; None where one has but one value."""
    if min(map(len, by_column)) < 2:
        return None
    rng = np.random.default_rng(0)  # the same table gives the same interval
    means = np.mean(
        [rng.choice(np.asarray(values), (RESAMPLES, len(values))).mean(1) for values in by_column], axis=0
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's t interval of the mean; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / n**0.5
    reach = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * error
    return mean - reach, mean + reach


def differences(rows: dict[str, Accuracies], columns: Sequence[str]) -> list[Difference]:
    """The best row, and AGFA, against every other."""
    means = {row: seed_means(of_row, columns) for row, of_row in rows.items()}
    complete = {row: float(np.mean(list(by_seed.values()))) for row, by_seed in means.items() if by_seed}
    leads = dict.fromkeys([*sorted(complete, key=complete.__getitem__)[-1:], *(["agfa"] if "agfa" in rows else [])])
    pairs = [(lead, other) for lead in leads for other in in_order(rows) if other != lead]
    distinct = [pair for i, pair in enumerate(pairs) if pair[::-1] not in pairs[:i]]
    found = (difference(row, rows[row], other, rows[other]) for row, other in distinct)
    return [d for d in found if d is not None]


def differences_table(name: str, found: Sequence[Difference]) -> Table:
    """The differences in points, in words that say what they rest on."""
    lines = tuple(
        Line(
            f"{title(d.row)} − {title(d.other)}",
            (
                points(d.mean),
                between(d.bootstrap),
                between(d.t),
                f"{d.pairs} pair{'' if d.pairs == 1 else 's'}, {d.seeds} whole seed{'' if d.seeds == 1 else 's'}",
                d.verdict,
            ),
        )
        for d in found
    )
    notes = (
        "Points of accuracy, on the seeds and targets that both have; the intervals of the mean are at 95%.",
        f"Bootstrap: seeds of each target drawn again {RESAMPLES:,} times (too narrow for few seeds). "
        "Paired t: per seed the mean over targets, then over seeds.",
        "Not corrected for the number of comparisons.",
    )
    return Table(
        name, ("Difference", "Mean", "Bootstrap", "Paired t", "Of", "No difference"), lines, notes, compared=False
    )


def points(fraction: float) -> str:
    """A difference in points, with its sign."""
    return f"{100 * fraction:+.1f}"


def between(interval: Interval | None) -> str:
    """An interval in points."""
    return "too few seeds" if interval is None else f"{points(interval[0])} to {points(interval[1])}"
