"""How far probabilities can be believed on unseen domains: the models of a table, from their runs' predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from agfa.benchmark.figures import GRID, STYLE, look
from agfa.benchmark.rows import AVERAGES, title
from agfa.benchmark.tables import Accuracies, Line, Table, cell, columns_of, in_order, part, seed_means
from agfa.training import predictions
from agfa.training.calibration import reliability
from agfa.training.predictions import Figures

SHARES = tuple(i / 20 for i in range(1, 21))
_NOTES = (
    "On domains that nothing was learnt from; the temperature is fitted on the sources' validation images alone.",
    "ECE: expected calibration error, 15 bins. Brier: over all classes, times 100. Surest: accuracy on that share of "
    "the images, those of the highest confidence.",
    "AUROC: images of the unseen domain told from the sources' validation images, by 1 - confidence and by the "
    "posterior's disagreement; 50 is not at all.",
)


@dataclass(frozen=True)
class Believed:
    """What is known of one row: figures by column and seed, and all its answers on unseen domains."""

    figures: dict[tuple[str, int], Figures] = field(default_factory=dict)
    temperatures: list[float] = field(default_factory=list)
    answers: list[pl.DataFrame] = field(default_factory=list)

    def mean(self, what: str, columns: Sequence[str]) -> dict[int, float]:
        """A figure by seed: the mean over columns of those seeds that have them all."""
        return self._over({place: getattr(of, what) for place, of in self.figures.items()}, columns)

    def surest(self, share: float, columns: Sequence[str]) -> dict[int, float]:
        """The accuracy of the most confident share, by seed."""
        return self._over({place: of.coverage.accuracy_at(share) for place, of in self.figures.items()}, columns)

    def _over(self, values: dict[tuple[str, int], float], columns: Sequence[str]) -> dict[int, float]:
        by_column: Accuracies = {}
        for (column, seed), value in values.items():
            if not np.isnan(value):
                by_column.setdefault(column, {})[seed] = value
        return seed_means(by_column, columns)


def believed(chosen: pl.DataFrame, frame: pl.DataFrame, group: tuple[str, str, str]) -> dict[str, Believed]:
    """By row, what the models of one table say; models of runs without predictions are left out."""
    finals = frame.filter(pl.col("kind") == "final").select("run", "model", "step").unique(maintain_order=True)
    steps = {(run, step): model for run, model, step in finals.rows() if model not in AVERAGES}
    averages = {run: model for run, model, _ in finals.rows() if model in AVERAGES}
    found: dict[str, Believed] = {}
    for row, column, seed, run, step in part(chosen, *group).select("row", "column", "seed", "run", "step").rows():
        told = _told(Path(run))
        model = averages.get(run) if step == 0 else steps.get((run, step))
        if told is None or model is None:
            continue
        of_model = told.filter(pl.col("model") == model)
        test, seen = of_model.filter(pl.col("split") == "test"), of_model.filter(pl.col("split") == "val")
        if test.is_empty():
            continue
        of_row = found.setdefault(row, Believed())
        of_row.figures[column, seed] = predictions.figures(test, seen)
        of_row.temperatures.append(float(test["temperature"][0]))
        of_row.answers.append(test.select("confidence", "right"))
    _told.cache_clear()
    return {row: found[row] for row in in_order(found)}


@cache
def _told(run: Path) -> pl.DataFrame | None:
    return predictions.read(run)


def calibration_table(rows: dict[str, Believed], chosen: pl.DataFrame, group: tuple[str, str, str]) -> Table:
    """A line for each row."""
    whole = part(chosen, *group)
    columns = columns_of(whole, group[0], with_all=False)
    lines = []
    for row, of_row in rows.items():
        low, high = min(of_row.temperatures), max(of_row.temperatures)
        temperature = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
        cells = [cell(of_row.mean(what, columns)) for what in ("accuracy", "ece", "brier")]
        cells += [cell(of_row.surest(share, columns)) for share in (0.8, 0.5)]
        cells += [cell(of_row.mean(what, columns)) for what in ("auroc", "auroc_disagreement")]
        lines.append(Line(title(row), (*cells, temperature)))
    header = (
        *("Method", "Accuracy", "ECE", "Brier", "Surest 80%", "Surest 50%"),
        *("AUROC, confidence", "AUROC, disagreement", "Temperature"),
    )
    without = whole.height - sum(len(of_row.figures) for of_row in rows.values())
    left = (f"{without} of {whole.height} models left no predictions, and are not here.",) if without else ()
    return Table(
        f"{group[0]}, {group[1]}: calibration on unseen domains", header, tuple(lines), (*_NOTES, *left), False
    )


def calibration_figure(rows: dict[str, Believed]) -> Figure:
    """Accuracy against coverage, the mean over columns and seeds; and reliability, of all their answers together."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        right.plot([0, 1], [0, 1], color=GRID["color"], linewidth=1)
        for i, (row, of_row) in enumerate(rows.items()):
            curve = [np.mean([of.coverage.accuracy_at(s) for of in of_row.figures.values()]) for s in SHARES]
            left.plot(SHARES, curve, **look(i), label=title(row))
            answers = pl.concat(of_row.answers)
            bins = reliability(answers["confidence"].to_numpy(), answers["right"].to_numpy())
            right.plot(bins.confidence, bins.accuracy, **look(i), marker=".")
        _labelled(left, "Share of images answered, the surest", "Accuracy on them")
        _labelled(right, "Confidence", "Accuracy")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, handlelength=3.2)
    return figure


def _labelled(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(**GRID)
