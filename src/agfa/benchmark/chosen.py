"""What stands behind a table: the hyperparameters that were selected, the source validation, the seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from agfa.benchmark.charts import Cost
from agfa.benchmark.records import read_config
from agfa.benchmark.rows import title
from agfa.benchmark.selection import Selection
from agfa.benchmark.tables import (
    Line,
    Table,
    accuracies,
    cell,
    columns_of,
    groups_of,
    heading,
    in_order,
    part,
    seed_means,
)


def selected_table(chosen: pl.DataFrame, how: Selection) -> Table:
    """The hyperparameters of every model in the tables, those selected for several columns and seeds together."""
    lines = []
    for group in groups_of(chosen):
        rows = part(chosen, *group)
        for row in in_order(rows["row"].unique()):
            of_row = rows.filter(pl.col("row") == row)
            for _, alike in of_row.group_by("settings", maintain_order=True):
                config = read_config(Path(alike["run"][0]))
                where = _where(group[0], alike) if alike.height < of_row.height else "all"
                steps = alike["step"]
                step = "averaged" if steps.max() == 0 else _span(steps.to_list())
                tried = _span(alike["tried"].to_list())
                name = f"{group[0]}, {group[1]}: {title(row)}"
                lines.append(Line(name, (where, tried, step, _listed(config.get("hparams") or {}))))
    header = ("Method", "For", "Of how many settings", "Step", "Hyperparameters")
    return Table(f"Selected by {how}", header, tuple(lines), compared=False)


def cost_table(chosen: pl.DataFrame, dataset: str, backbone: str, protocol: str) -> Table:
    """Source validation and seconds of what is in one table."""
    rows = part(chosen, dataset, backbone, protocol)
    lines = []
    for row in in_order(rows["row"].unique()):
        of_row = rows.filter(pl.col("row") == row)
        seconds = of_row["seconds"].mean()
        by_seed = dict(of_row.group_by("seed").agg(pl.col("val").mean()).sort("seed").rows())
        found = {seed: value for seed, value in by_seed.items() if value is not None}
        lines.append(
            Line(
                title(row),
                (cell(found), _seconds(seconds if isinstance(seconds, float) else None), str(of_row.height)),
            )
        )
    name = f"{dataset}, {backbone}: source validation and cost"
    notes = ("A training that gives several rows (an average, and the model that it is of) is counted in each.",)
    return Table(name, ("Method", "Source validation", "Seconds a training", "Models"), tuple(lines), notes, False)


def costs(chosen: pl.DataFrame, dataset: str, backbone: str, protocol: str) -> list[Cost]:
    """Seconds and average of each row that has both."""
    rows = part(chosen, dataset, backbone, protocol)
    columns = columns_of(rows, dataset, with_all=False)
    found = []
    for row, of_row in accuracies(rows).items():
        seconds = rows.filter(pl.col("row") == row)["seconds"].mean()
        average = cell(seed_means(of_row, columns))
        if isinstance(seconds, float) and average is not None:
            found.append(Cost(title(row), seconds, average))
    return found


def _where(dataset: str, rows: pl.DataFrame) -> str:
    """Columns, each with its seeds."""
    seeds: dict[str, list[int]] = {}
    for column, seed in rows.select("column", "seed").sort("column", "seed").rows():
        seeds.setdefault(heading(dataset, column), []).append(seed)
    return "; ".join(f"{name} (seed {', '.join(map(str, of))})" for name, of in seeds.items())


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _listed(hparams: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in hparams.items()) or "none"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
