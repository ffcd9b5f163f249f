"""Figures made of finished tables: sensitivity, ablation, accuracy against cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter

from agfa.benchmark.figures import GRID, STYLE, look
from agfa.benchmark.published import AVERAGE
from agfa.benchmark.sensitivity import Curve, printed_curve
from agfa.benchmark.tables import Cell, Line

ACCURACY = "Accuracy in per cent"


@dataclass(frozen=True)
class Cost:
    """What a row's trainings took, and what they gave."""

    label: str
    seconds: float
    accuracy: Cell


def sensitivity_figure(curve: Curve) -> Figure:
    """The average against the hyperparameter, with standard errors, and the paper's where it prints one."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        axes = figure.subplots()
        _curve(axes, {value: cells[-1] for value, cells in curve.points.items()}, "measured", 0)
        published = {value: cells.get(AVERAGE) for value, cells in printed_curve(curve).items()}
        if published:
            _curve(axes, published, "published", 1)
            axes.legend(frameon=False, handlelength=3.2)
        axes.set(xlabel=curve.hparam, ylabel=ACCURACY)
        axes.grid(**GRID)
    return figure


def ablation_figure(lines: Sequence[Line]) -> Figure:
    """The average of each line as a bar, with its standard error."""
    shown = [(line.label, average) for line in lines if isinstance(average := line.cells[-1], Cell)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 0.8 + 0.42 * len(shown)), layout="constrained")
        axes = figure.subplots()
        means = [100 * cell.mean for _, cell in shown]
        errors = [100 * (cell.error or 0) for _, cell in shown]
        axes.barh(
            range(len(shown)), means, xerr=errors, height=0.62, color=look(0)["color"], ecolor="#24292f", capsize=3
        )
        for place, (_, cell) in enumerate(shown):
            axes.annotate(
                cell.shown, (0, place), xytext=(5, 0), textcoords="offset points", va="center", color="#ffffff"
            )
        axes.set_yticks(range(len(shown)), [label for label, _ in shown])
        axes.invert_yaxis()
        axes.set_xlabel(ACCURACY)  # from 0: the length of a bar is its value
    return figure


def cost_figure(costs: Sequence[Cost]) -> Figure:
    """Accuracy against the seconds of a training, a point for each row."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for i, cost in enumerate(costs):
            error = None if cost.accuracy.error is None else 100 * cost.accuracy.error
            axes.errorbar(
                cost.seconds, 100 * cost.accuracy.mean, yerr=error, fmt="o", color=look(i)["color"], capsize=3
            )
            axes.annotate(
                cost.label, (cost.seconds, 100 * cost.accuracy.mean), xytext=(7, 4), textcoords="offset points"
            )
        axes.set(xlabel="Seconds of a training", ylabel=ACCURACY, xlim=(0, 1.3 * max(c.seconds for c in costs)))
        axes.margins(y=0.15)
        axes.grid(**GRID)
    return figure


def _curve(axes: Axes, points: dict[float, Cell | None], label: str, i: int) -> None:
    measured = [(value, cell) for value, cell in sorted(points.items()) if cell is not None]
    axes.errorbar(
        [value for value, _ in measured],
        [100 * cell.mean for _, cell in measured],
        yerr=[100 * (cell.error or 0) for _, cell in measured],
        label=label,
        marker="o",
        markersize=4,
        capsize=3,
        **look(i),
    )
    axes.yaxis.set_major_formatter(FormatStrFormatter("%.1f"))
