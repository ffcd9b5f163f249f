"""How accuracy depends on one hyperparameter: found in runs that differ in nothing else.

Every setting stands for itself here: selection picks no more than its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from agfa.benchmark import published
from agfa.benchmark.published import AVERAGE
from agfa.benchmark.records import read_config, settings_digest
from agfa.benchmark.rows import AVERAGES, row_of, title
from agfa.benchmark.selection import LEAVE_ONE_OUT, Selection, select
from agfa.benchmark.tables import (
    Cell,
    Line,
    Table,
    accuracies,
    cell,
    columns_of,
    groups_of,
    heading,
    part,
    seed_means,
)

LEAST = 3  # values that make a curve


@dataclass(frozen=True)
class Curve:
    """Mean accuracy for each value of a hyperparameter, all else being equal."""

    dataset: str
    backbone: str
    row: str
    hparam: str
    columns: tuple[str, ...]
    points: dict[float, tuple[Cell | None, ...]]  # value: each column, and their average


def curves(frame: pl.DataFrame, how: Selection) -> list[Curve]:
    """Every hyperparameter that took three values or more in runs of a method that were otherwise alike."""
    averaged = pl.col("model").is_in(AVERAGES).fill_null(False)
    model = pl.when(averaged).then("model").otherwise(pl.lit(""))
    each = select(frame.with_columns(row=pl.concat_str([model, "settings"], separator=" ")), how)
    found = []
    for dataset, backbone, protocol in groups_of(each):
        if protocol == LEAVE_ONE_OUT:
            chosen = part(each, dataset, backbone, protocol)
            found += list(_of_table(chosen, dataset, backbone))
    return found


def curve_table(curve: Curve) -> Table:
    """A line for each value, and the paper's beside it where it prints one."""
    headings = [heading(curve.dataset, column) for column in curve.columns]
    printed = printed_curve(curve)
    lines = []
    for value in sorted({*curve.points, *printed}):
        if value in curve.points:
            lines.append(Line(f"{curve.hparam}={value:g}", curve.points[value]))
        if value in printed:
            theirs = tuple(printed[value].get(name) for name in (*headings, AVERAGE))
            lines.append(Line(f"{curve.hparam}={value:g}, published", theirs, "published"))
    name = f"{curve.dataset}, {curve.backbone}: {title(curve.row)}, {curve.hparam} varied"
    return Table(name, (curve.hparam, *headings, AVERAGE), tuple(lines), ("Nothing else differs.",))


def _of_table(chosen: pl.DataFrame, dataset: str, backbone: str) -> Iterator[Curve]:
    columns = columns_of(chosen, dataset, with_all=False)
    by_row = accuracies(chosen)
    examples = {row: Path(run) for row, run in chosen.select("row", "run").rows()}
    families: dict[str, dict[float, str]] = {}  # all but one hyperparameter: its value, the row
    owners: dict[str, tuple[str, str]] = {}
    for row, run in examples.items():
        model, _, _ = row.partition(" ")
        config = read_config(run)
        hparams: dict[str, Any] = dict(config.get("hparams") or {})
        for name, value in hparams.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            others = {key: other for key, other in hparams.items() if key != name}
            family = f"{model} {name} {settings_digest(config, others, averaged=bool(model))}"
            families.setdefault(family, {})[float(value)] = row
            # the row that a value which stands for no ablation gives: eta = 0 has a row of its own
            if value:
                owners[family] = row_of(config["algorithm"], hparams, model or None), name
    for family, values in families.items():
        points = {
            value: (*(cell(by_row[r].get(c, {})) for c in columns), cell(seed_means(by_row[r], columns)))
            for value, r in sorted(values.items())
            if len(by_row[r]) > 1 or len(columns) == 1  # a value drawn for one run alone is no point of a curve
        }
        if len(points) >= LEAST and family in owners:
            yield Curve(dataset, backbone, *owners[family], tuple(columns), points)


def printed_curve(curve: Curve) -> dict[float, dict[str, Cell]]:
    """The paper's curve of the same hyperparameter: by value and column."""
    rows = published.read().filter(
        pl.col("dataset") == curve.dataset,
        pl.col("row") == curve.row,
        pl.col("setting").str.starts_with(f"{curve.hparam}="),
    )
    found: dict[float, dict[str, Cell]] = {}
    for r in rows.rows(named=True):
        value = float(r["setting"].partition("=")[2])
        found.setdefault(value, {})[r["column"]] = Cell(r["mean"], r["error"], None, r["decimals"])
    shown = [heading(curve.dataset, column) for column in curve.columns]
    for cells in found.values():
        if set(shown) != cells.keys() - {AVERAGE}:  # an average of what is shown, to stand beside ours
            cells[AVERAGE] = Cell(sum(cells[name].mean for name in shown) / len(shown), decimals=2)
    return found
